"""What runs on a machine have shown of it, as corrections of the closed form, kept by what they hold for.

A profile is a small JSON file in the cache folder, named by a hash of model, layout, batch, device and versions.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer.config.schema import Config, HardwareConfig

_PACKAGES = ("torch", "megatron-core", "transformer-engine")


@dataclass(frozen=True)
class Calibration:
    """Corrections; the default corrects nothing."""

    #: measured over predicted seconds of forward and backward
    compute: float = 1.0
    #: measured less predicted peak
    extra_bytes: int = 0
    #: each way, with both directions busy
    link_gbps: float | None = None
    #: forward seconds of single pieces of a layer
    pieces: tuple[tuple[str, float], ...] = ()


def load_calibration(config: Config, hardware: HardwareConfig) -> Calibration:
    """What an earlier run of this kind measured; no corrections where there was none."""
    if not config.plan.calibrate_steps:
        return Calibration()
    try:
        found = json.loads(_file(config, hardware).read_text(encoding="utf-8"))
        return Calibration(**found | {"pieces": tuple((name, seconds) for name, seconds in found["pieces"])})
    except (OSError, ValueError, TypeError, KeyError):
        return Calibration()


def store_calibration(config: Config, hardware: HardwareConfig, calibration: Calibration) -> None:
    """Keep it for later runs. A cache that can't be written is no reason for a run to fail."""
    file = _file(config, hardware)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(dataclasses.asdict(calibration)), encoding="utf-8")
        draft.replace(file)


def _file(config: Config, hardware: HardwareConfig) -> Path:
    root = config.data.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megafit"
    identity = json.dumps(_identity(config, hardware), sort_keys=True, default=str)
    return Path(root).expanduser() / "profiles" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"


def _identity(config: Config, hardware: HardwareConfig) -> dict[str, Any]:
    """All that bytes and seconds depend on, but for the plan."""
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    parallel = {**vars(config.parallel)}
    parallel.pop("timeout_s")
    model = {**vars(config.model)}
    model.pop("name")
    return {
        "model": model,
        "parallel": parallel,
        "micro_batch_size": config.trainer.micro_batch_size,
        "precision": config.trainer.precision,
        "optimizer": config.optim.name,
        "device": hardware.name,
        "versions": versions,
    }
