"""The files of a run's folder that other programs read: config_resolved.yaml, metrics.jsonl and result.json.

Numbers are written at full precision; what isn't finite becomes null, so that every line is valid JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from trainer.report.summary import Summary

RESULT = "result.json"
#: status of a search's run that was refused or ran out of memory
PRUNED = "pruned"
METRICS = "metrics.jsonl"
CONFIG = "config_resolved.yaml"
PLAN = "plan.yaml"


def write_atomically(path: Path, text: str) -> None:
    """Whoever reads `path` at whatever time sees the old content or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_result(folder: Path, summary: Summary) -> None:
    text = json.dumps(_finite(dataclasses.asdict(summary)), indent=1, default=str, allow_nan=False)
    write_atomically(folder / RESULT, text + "\n")


def read_result(folder: Path) -> dict[str, Any]:
    """The content of result.json; empty if there is none."""
    path = folder / RESULT
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write_failure(folder: Path, status: str, message: str) -> None:
    """Say of a run that failed without being able to say so itself: what it has written so far stays."""
    ended = {"status": status, "message": message}
    write_atomically(folder / RESULT, json.dumps(read_result(folder) | ended, indent=1) + "\n")


def write_pruned(folder: Path, message: str) -> None:
    """Say of a run that could not be done that a search has taken note of it: its sweep has not failed."""
    write_failure(folder, PRUNED, message)


class MetricsFile:
    """metrics.jsonl, one JSON object a line, each on disk when `append` returns.

    A run that goes on in the folder of an earlier one continues its file: lines from `first_step` on, which the
    earlier run wrote after its last checkpoint, and a line cut off by a kill go away.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        path = folder / METRICS
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] < first_step]
        write_atomically(path, "".join(kept))
        self._file: IO[str] = path.open("a")

    def append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
