"""How Hydra started this process: what a run's group, tags and notes are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """All empty for a run that Hydra did not start."""

    #: config group -> chosen option, Hydra's own groups left out
    choices: Mapping[str, str] = field(default_factory=dict)
    #: what the user typed
    overrides: Sequence[str] = ()
    #: name of the sweep's folder, and this job's number in it
    sweep: str | None = None
    job_number: int | None = None

    @staticmethod
    def current() -> Launch:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        if not HydraConfig.initialized():
            return Launch()
        hydra = HydraConfig.get()
        choices = {
            group: str(option)
            for group, option in hydra.runtime.choices.items()
            if not group.startswith("hydra/") and option not in (None, "none")
        }
        # our launcher's jobs are single runs that are told their number
        swept = not OmegaConf.is_missing(hydra.job, "num")
        return Launch(
            choices=choices,
            overrides=tuple(hydra.overrides.task),
            sweep=Path(hydra.sweep.dir).name if swept else None,
            job_number=int(hydra.job.num) if swept else None,
        )
