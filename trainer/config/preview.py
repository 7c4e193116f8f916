"""What validate_only=true prints: the configuration and the plan. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from memory.table import LEGEND
from trainer.config.compose import Job
from trainer.config.machine import Machine
from trainer.config.provenance import explained
from trainer.plan import estimate_lines, shown_plan
from trainer.shape import plans_for_gpu


def resolved_yaml(composed: DictConfig) -> str:
    """The configuration as YAML with every interpolation worked out."""
    return OmegaConf.to_yaml(composed, resolve=True)


def print_preview(jobs: Sequence[Job], machine: Machine) -> None:
    """Print each job's configuration and plan to stdout."""
    for job in _headed(jobs):
        _print_yaml(resolved_yaml(job.resolved))
        print("\n".join(plan_lines(job, machine)))


def print_explanation(jobs: Sequence[Job]) -> None:
    """Print who set the key that each job's `explain` names. Raises ConfigError when there is no such key."""
    for job in _headed(jobs):
        if job.config.explain is not None:
            print("\n".join(explained(job.config.explain, job.provenance)))


def _headed(jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs, each told by a line of its own if there are several."""
    for number, job in enumerate(jobs):
        if len(jobs) > 1:
            print(f"# job {number}: {' '.join(job.overrides)}")
        yield job


def plan_lines(job: Job, machine: Machine) -> list[str]:
    """The plan as aligned columns under a line that says what the marks mean."""
    for_gpu = plans_for_gpu(job.config, machine.has_cuda)
    shown = shown_plan(job.config, for_gpu)
    table = [shown.header, *shown.rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(shown.header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return ["", f"Plan ({LEGEND})", *lines, *shown.notes, *estimate_lines(job.config, for_gpu)]


def _print_yaml(text: str) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, end="")
