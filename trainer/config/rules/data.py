"""Rules of the data's source. Imports no torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import at_least
from trainer.config.schema import Config, DataSource

BYTE_VOCAB_SIZE = 256


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    data = config.data
    yield from at_least(config, 1, "data.vocab_size")
    if data.path is None and data.source in (DataSource.text, DataSource.megatron):
        yield ConfigError("data.path", f"data={data.source.name} needs one", "Add data.path=...")
    elif data.source is DataSource.text:
        yield from _text(data.path)
    elif data.source is DataSource.megatron:
        yield from _megatron(data.path)
        if data.vocab_size is None and data.tokenizer == "byte" and config.model.vocab_size is None:
            yield ConfigError(
                "data.vocab_size",
                "ready-made tokens do not say how many different ones there are",
                "Write data.vocab_size=..., or data.tokenizer=PATH of the tokenizer.json they were made with",
            )
    elif data.path is not None and data.source is not DataSource.registered:
        yield ConfigError(
            "data.path",
            f"would do nothing: data={data.source.name} reads no files of yours",
            "Add data=text or drop it",
        )
    yield from _vocabulary(config)
    yield from _split(config)


def _paths(path: Any) -> list[Any] | None:
    if isinstance(path, str) and path:
        return [path]
    return list(path) if isinstance(path, (list, tuple)) and path else None


def _text(path: Any) -> Iterator[ConfigError]:
    patterns = _paths(path)
    if patterns is None:
        yield ConfigError("data.path", f"{path!r} names no files", "Write data.path=FILE, or 'data.path=[FILE,FILE]'")
        return
    for pattern in map(str, patterns):
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            yield ConfigError(
                "data.path", f"{pattern} is a folder", f"Write a glob, 'data.path=\"{pattern}/**/*.txt\"'"
            )
        elif not os.path.isfile(expanded) and not any(map(os.path.isfile, glob.iglob(expanded, recursive=True))):
            yield ConfigError("data.path", f"no file matches {pattern}", "Paths are relative to the current folder")


def _megatron(path: Any) -> Iterator[ConfigError]:
    parts = _paths(path)
    if parts is None:
        yield ConfigError(
            "data.path",
            f"{path!r} names no dataset",
            "Write data.path=PREFIX, or 'data.path=[WEIGHT,PREFIX,WEIGHT,PREFIX]'",
        )
        return
    prefixes = parts
    if len(parts) > 1:
        weights, prefixes = parts[::2], parts[1::2]
        if len(parts) % 2 or not all(_is_weight(weight) for weight in weights):
            yield ConfigError(
                "data.path",
                "a blend is a list of weights above 0 and prefixes in turn",
                "Write 'data.path=[0.7,PREFIX,0.3,PREFIX]'",
            )
            return
    for prefix in map(str, prefixes):
        stem = prefix.removesuffix(".bin").removesuffix(".idx")
        if stem != prefix:
            yield ConfigError("data.path", f"{prefix} is a file, and a prefix is wanted", f"Write data.path={stem}")
            continue
        for suffix in (".bin", ".idx"):
            if not Path(os.path.expanduser(prefix) + suffix).is_file():
                yield ConfigError(
                    "data.path", f"there is no file {prefix}{suffix}", "Give the path of the two without .bin and .idx"
                )


def _is_weight(value: Any) -> bool:
    try:
        return float(value) > 0
    except (TypeError, ValueError):
        return False


def _vocabulary(config: Config) -> Iterator[ConfigError]:
    data, vocab_size = config.data, config.model.vocab_size
    uses_text = data.source in (DataSource.stdlib, DataSource.text)
    if data.tokenizer != "byte":
        if not os.path.isfile(os.path.expanduser(data.tokenizer)):
            yield ConfigError(
                "data.tokenizer",
                f"there is no file {data.tokenizer}",
                "Write data.tokenizer=byte or the path of a tokenizer.json",
            )
    elif uses_text and vocab_size is not None and vocab_size < BYTE_VOCAB_SIZE:
        yield ConfigError(
            "model.vocab_size",
            f"{vocab_size} is below the {BYTE_VOCAB_SIZE} of data.tokenizer=byte",
            f"Write model.vocab_size={BYTE_VOCAB_SIZE} or null",
        )
    if uses_text and data.vocab_size is not None:
        yield ConfigError(
            "data.vocab_size", "would do nothing: the tokenizer says it", "Drop it, or write model.vocab_size"
        )
    elif data.vocab_size is not None and vocab_size is not None and data.vocab_size > vocab_size:
        yield ConfigError(
            "data.vocab_size",
            f"{data.vocab_size} is above model.vocab_size={vocab_size}",
            f"Write data.vocab_size={vocab_size} or less",
        )


def _split(config: Config) -> Iterator[ConfigError]:
    text = config.data.split
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    remedy = "Write three shares, 'data.split=\"95,5,0\"'"
    if len(shares) != 3 or not all(0 <= part < float("inf") for part in shares):
        yield ConfigError("data.split", f"{text} is not three shares of train, validation and test", remedy)
    elif shares[0] == 0:
        yield ConfigError("data.split", f"{text} leaves nothing to train on", remedy)
    elif shares[1] == 0 and config.trainer.eval_batches:
        yield ConfigError(
            "data.split",
            f"{text} leaves nothing to evaluate on",
            "Give validation a share or write trainer.eval_batches=0",
        )
