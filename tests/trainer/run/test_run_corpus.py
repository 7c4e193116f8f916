from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.config.errors import ConfigError
from trainer.run.data.corpus import TextFiles, build_corpus, publish, stdlib_files, text_files
from trainer.run.data.tokenizer import ByteTokenizer, load_tokenizer


def write(folder: Path, **texts: str) -> TextFiles:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return TextFiles(folder, tuple(texts))


def documents(prefix: Path) -> list[bytes]:
    dataset = IndexedDataset(str(prefix))
    return [bytes(dataset[index].astype(np.uint8)) for index in range(len(dataset))]


def word_tokenizer(path: Path, vocabulary: dict[str, int]) -> Path:
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    path.write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    return path


def test_each_file_is_a_document_ended_by_nul(tmp_path: Path) -> None:
    prefix = build_corpus(write(tmp_path / "in", b="two", a="", c="three"), ByteTokenizer(), tmp_path / "cache")
    assert documents(prefix) == [b"two\0", b"three\0"]


def test_a_long_file_is_cut_and_ended_once(tmp_path: Path) -> None:
    prefix = build_corpus(write(tmp_path / "in", a="x" * 600), ByteTokenizer(), tmp_path / "cache")
    assert documents(prefix) == [b"x" * 256, b"x" * 256, b"x" * 88 + b"\0"]


def test_built_once_and_anew_when_a_file_changes(tmp_path: Path) -> None:
    files = write(tmp_path / "in", a="old")
    prefix = build_corpus(files, ByteTokenizer(), tmp_path / "cache")
    made = os.stat(f"{prefix}.bin").st_mtime_ns
    assert build_corpus(files, ByteTokenizer(), tmp_path / "cache") == prefix
    assert os.stat(f"{prefix}.bin").st_mtime_ns == made
    write(tmp_path / "in", a="newer")
    other = build_corpus(files, ByteTokenizer(), tmp_path / "cache")
    assert other != prefix and documents(other) == [b"newer\0"]
    assert [path.name for path in other.parent.parent.glob(".*")] == []


def test_whoever_is_first_wins(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
        publish(tmp_path / name, tmp_path / "final")
    assert (tmp_path / "final" / "text").read_text() == "first"


def test_order_depends_on_names_alone(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(20)]
    for folder in ("a", "b"):
        write(tmp_path / folder, **dict.fromkeys(names, "x"))
    ours, theirs = (text_files(str(tmp_path / folder / "*.txt")) for folder in ("a", "b"))
    assert ours.names == theirs.names
    assert sorted(ours.names) == sorted(names) and ours.names != tuple(sorted(names))


def test_paths(tmp_path: Path) -> None:
    files = write(tmp_path / "in", **{"a.txt": "a", "b[1].txt": "b", "c.md": "c"})
    root = files.root
    assert text_files(str(root / "b[1].txt")).names == ("b[1].txt",)
    assert sorted(text_files([str(root / "*.txt"), str(root / "c.md"), str(root / "a.txt")]).names) == [
        "a.txt",
        "b[1].txt",
        "c.md",
    ]


def test_no_file_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path: no file matches"):
        text_files(str(tmp_path / "*.txt"))


def test_stdlib_holds_real_modules_and_no_tests() -> None:
    files = stdlib_files()
    assert {"json/decoder.py", "argparse.py"} <= set(files.names)
    assert not [
        name for name in files.names if "site-packages/" in name or "/tests/" in name or name.startswith("test/")
    ]
    total = sum(path.stat().st_size for path in files.paths())
    assert 8_000_000 < total <= 16_000_000
    fewer = stdlib_files(limit_bytes=1_000_000)
    assert fewer.names == files.names[: len(fewer.names)] and len(fewer.names) < len(files.names)


def test_file_tokenizer(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "t.json", {"<unk>": 0, "a": 1, "</s>": 2, "b": 9})
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 2)
    assert tokenizer.encode(b"b a zz").tolist() == [9, 1, 0]
    dataset = IndexedDataset(str(build_corpus(write(tmp_path / "in", x="a b"), tokenizer, tmp_path / "cache")))
    assert dataset[0].tolist() == [1, 9, 2]


def test_file_tokenizer_without_an_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_tokenizer(tmp_path / "t.json", {"<unk>": 0, "a": 1})))
    assert tokenizer.eod is None
    dataset = IndexedDataset(str(build_corpus(write(tmp_path / "in", x="a a"), tokenizer, tmp_path / "cache")))
    assert dataset[0].tolist() == [1, 1]


def test_bad_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data.tokenizer: .*is no tokenizer file"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_files_that_are_no_text(tmp_path: Path) -> None:
    files = write(tmp_path / "in", a="")
    with pytest.raises(ConfigError, match=r"data.path: all files are empty"):
        build_corpus(files, ByteTokenizer(), tmp_path / "cache")
    (tmp_path / "in" / "a").write_bytes(b"\xff\xfe")
    tokenizer = load_tokenizer(str(word_tokenizer(tmp_path / "t.json", {"<unk>": 0})))
    with pytest.raises(ConfigError, match=r"data.path: cannot read .*/in/a as text"):
        build_corpus(files, tokenizer, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"data.cache_dir: cannot write to .*/a/corpora"):
        build_corpus(files, tokenizer, tmp_path / "in" / "a")
    assert list((tmp_path / "cache" / "corpora").iterdir()) == []
