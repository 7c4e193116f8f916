"""Rules of what a run measures of itself. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import at_least
from trainer.config.schema import BaselineMode, Config, GuardConfig, ProfileKind

_THRESHOLDS = [field.name for field in dataclasses.fields(GuardConfig) if field.name != "action"]


def size_problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from at_least(config, 1, "baseline.steps", "profile.steps")
    yield from at_least(config, 0, *(f"guard.{name}" for name in _THRESHOLDS))


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from _baseline(config)
    if config.profile.kind in (ProfileKind.memory, ProfileKind.nvtx) and not machine.has_cuda:
        yield ConfigError(
            "profile.kind",
            f"{config.profile.kind.value} looks at a GPU, and this machine has none",
            "Write profile=trace or profile=none",
        )


def _baseline(config: Config) -> Iterator[ConfigError]:
    mode, path = config.baseline.mode, config.baseline.path
    if mode is BaselineMode.file and path is None:
        yield ConfigError(
            "baseline.path", "baseline=file needs one", "Add baseline.path=FOLDER, a run's or one above it"
        )
    elif mode is BaselineMode.file and path is not None and not Path(path).expanduser().is_dir():
        yield ConfigError(
            "baseline.path", f"there is no folder {path}", "Give the folder of a run with everything kept"
        )
    elif mode is not BaselineMode.file and path is not None:
        yield ConfigError(
            "baseline.path", "would do nothing: only baseline=file reads it", "Add baseline=file or drop it"
        )
