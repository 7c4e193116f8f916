"""What the rules need to know of the machine, found out without importing torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    #: processes of this run; None: not started yet, so as many as the configuration needs
    world_size: int | None
    has_cuda: bool
    #: version of Transformer Engine; None: not installed
    te_version: tuple[int, ...] | None
    environment: Mapping[str, str]

    @property
    def has_te(self) -> bool:
        return self.te_version is not None

    def lacking(self) -> str:
        """What stands between this machine and Transformer Engine's modules."""
        missing = [
            name for name, there in (("no GPU", self.has_cuda), ("no Transformer Engine", self.has_te)) if not there
        ]
        return f"this machine has {' and '.join(missing)}"


def this_machine() -> Machine:
    world_size = os.environ.get("WORLD_SIZE")
    return Machine(
        world_size=int(world_size) if world_size else None,
        has_cuda=_has_cuda(),
        te_version=_te_version(),
        environment=dict(os.environ),
    )


def _has_cuda() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _te_version() -> tuple[int, ...] | None:
    if find_spec("transformer_engine") is None:
        return None
    for name in ("transformer-engine", "transformer_engine"):
        try:
            numbers = metadata.version(name).split("+")[0].split(".")
        except metadata.PackageNotFoundError:
            continue
        return tuple(int(number) for number in numbers if number.isdigit())
    return (0,)


def hydra_overrides_of_rank(machine: Machine) -> list[str]:
    """Only the first process writes Hydra's logs and its record of the overrides."""
    if machine.environment.get("RANK", "0") == "0":
        return []
    return ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
