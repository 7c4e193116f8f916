"""Text files to one Megatron indexed dataset (.bin/.idx), built once and kept in the cache folder."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sysconfig
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError
from trainer.run.data.tokenizer import Tokenizer

#: raised when the same files and tokenizer would give another .bin
FORMAT = 1
#: of the running Python's own sources; all of them in current versions
STDLIB_LIMIT_BYTES = 16_000_000
#: folders of the standard library that hold tests, generated tables of tests, or other people's packages
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
#: A file is cut into documents no longer than this share of all, so that a split holds for one large file too
LONGEST_SHARE = 1 / 200
SHORTEST_CUT_TOKENS = 256


@dataclass(frozen=True)
class TextFiles:
    """Files of a corpus, in the order in which they become documents."""

    root: Path
    #: relative to root
    names: tuple[str, ...]

    def paths(self) -> list[Path]:
        return [self.root / name for name in self.names]


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megafit"


def _in_mixed_order(root: Path, names: Sequence[str]) -> TextFiles:
    """The same order on every machine, and no subject gathered in the held-out share at the end."""
    return TextFiles(root, tuple(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())))


def stdlib_files(limit_bytes: int = STDLIB_LIMIT_BYTES) -> TextFiles:
    """The running Python's own library sources, tests left out, up to `limit_bytes` in all.

    Raises:
        ConfigError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, files in os.walk(root):
        # pruned here, for installed packages can be many times the library
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    names: list[str] = []
    total_bytes = 0
    for name in _in_mixed_order(root, found).names:
        total_bytes += (root / name).stat().st_size
        if total_bytes > limit_bytes:
            break
        names.append(name)
    if not names:
        raise ConfigError(
            "data.source", f"this Python has no library sources in {root}", "Use data=text data.path=<files>"
        )
    return TextFiles(root, tuple(names))


def text_files(path: str | Sequence[str]) -> TextFiles:
    """Files that data.path names: one path or glob, or a list of them.

    Raises:
        ConfigError: no file there.
    """
    patterns = [path] if isinstance(path, str) else path
    found: set[Path] = set()
    for pattern in map(os.path.expanduser, patterns):
        # a file whose name holds [ or * is a file, not a pattern
        matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        found.update(Path(match).resolve() for match in matches if os.path.isfile(match))
    if not found:
        raise ConfigError("data.path", f"no file matches {path!r}", "Give an existing file or a glob")
    root = Path(os.path.commonpath([file.parent for file in found]))
    return _in_mixed_order(root, [file.relative_to(root).as_posix() for file in found])


def build_corpus(files: TextFiles, tokenizer: Tokenizer, cache_dir: Path) -> Path:
    """Tokenise `files` into an indexed dataset, or find the one built before.

    Each file is a document, ended by the tokenizer's end token; the documents' cuts are the dataset's sequences, which
    Megatron splits by. Several processes may build the same corpus at once: whoever is first to finish wins.

    Returns:
        prefix of the .bin and .idx files.

    Raises:
        ConfigError: a file cannot be read as text, all are empty, or the cache folder cannot be written.
    """
    stamps = [(name, (files.root / name).stat()) for name in files.names]
    identity = [FORMAT, tokenizer.fingerprint, str(files.root), [(n, s.st_size, s.st_mtime_ns) for n, s in stamps]]
    folder = cache_dir / "corpora" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    if folder.is_dir():
        return folder / "text"
    draft = draft_of(folder)
    try:
        longest = max(SHORTEST_CUT_TOKENS, int(sum(s.st_size for _, s in stamps) * LONGEST_SHARE))
        _write_indexed(files, tokenizer, draft / "text", longest)
        (draft / "sources.json").write_text(json.dumps(identity))
        publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder / "text"


def draft_of(folder: Path) -> Path:
    """A new folder beside `folder`, in which it can be built unseen."""
    draft = folder.with_name(f".building-{uuid.uuid4().hex}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "data.cache_dir", f"cannot write to {folder.parent} ({error})", "Give a writable folder"
        ) from error
    return draft


def publish(draft: Path, folder: Path) -> None:
    """Give a finished folder its name at once; keep the other one when somebody was faster."""
    try:
        os.rename(draft, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _write_indexed(files: TextFiles, tokenizer: Tokenizer, prefix: Path, longest_tokens: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    total_tokens = 0
    for path in files.paths():
        try:
            tokens = tokenizer.encode(path.read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("data.path", f"cannot read {path} as text ({error})", "Leave that file out") from error
        if not tokens.size:
            continue
        if tokenizer.eod is not None:
            tokens = np.append(tokens, np.asarray(tokenizer.eod, dtype=tokens.dtype))
        full, rest = divmod(tokens.size, longest_tokens)
        builder.add_document(tokens, [longest_tokens] * full + [rest] * bool(rest))
        total_tokens += tokens.size
    if not total_tokens:
        raise ConfigError("data.path", "all files are empty", "Give files that hold text")
    builder.finalize(f"{prefix}.idx")
