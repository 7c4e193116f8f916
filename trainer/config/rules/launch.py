"""Whether these processes can start this composition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.compose import Composition
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine


def machine_of_jobs(composition: Composition, machine: Machine) -> Machine:
    """The machine as each job will find it: the launcher of a sweep starts the job's processes."""
    sweep = composition.sweep
    return replace(machine, world_size=sweep.processes) if sweep and sweep.processes > 1 else machine


def launch_problems(composition: Composition, machine: Machine) -> Iterator[ConfigError]:
    """Problems of starting, rather than of the configuration itself: validate_only does not have them."""
    sweep = composition.sweep
    if sweep and ((machine.world_size or 1) > 1 or "TORCHELASTIC_RUN_ID" in machine.environment):
        yield ConfigError(
            "-m",
            f"each of the {machine.world_size} processes would run a sweep of its own",
            "Start the sweep without torchrun; hydra.launcher.nproc_per_node=N gives each job N processes",
        )
        return
    for job in composition.jobs:
        parallel = job.config.parallel
        needed = parallel.tensor * parallel.pipeline * parallel.context
        if machine_of_jobs(composition, machine).world_size is None and needed > 1:
            yield ConfigError(
                "parallel",
                f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} "
                f"takes {needed} processes, this is one",
                f"Add hydra/launcher=process hydra.launcher.nproc_per_node={needed}"
                if sweep
                else f"Start it by torchrun --standalone --nproc-per-node={needed} train.py ...",
            )
