"""Whether these processes can start this composition."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.compose import Composition
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine


def launch_problems(composition: Composition, machine: Machine) -> Iterator[ConfigError]:
    """Problems of starting, rather than of the configuration itself: validate_only does not have them."""
    world_size = machine.world_size or 1
    if composition.multirun and world_size > 1:
        yield ConfigError(
            "-m",
            f"each of the {world_size} processes would run a sweep of its own",
            "Start the sweep without torchrun; the launcher starts the processes of each job",
        )
    for job in composition.jobs:
        parallel = job.config.parallel
        needed = parallel.tensor * parallel.pipeline * parallel.context
        if machine.world_size is None and needed > 1:
            yield ConfigError(
                "parallel",
                f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} "
                f"takes {needed} processes, this is one",
                f"Start it by torchrun --standalone --nproc-per-node={needed} train.py ...",
            )
