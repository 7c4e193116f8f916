"""Rules between keys: what the schema's types can't say. Each module of this package holds those of one subject.

A rule says what is wrong, with the key and the remedy, before any process group or device exists. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules import data, measure, megatron, model, offload, parallel, plan, recompute, registered, run
from trainer.config.rules.launch import launch_problems, machine_of_jobs
from trainer.config.schema import Config

__all__ = ["Rule", "launch_problems", "machine_of_jobs", "validate"]

Rule = Callable[[Config, Machine], Iterator[ConfigError]]

#: sizes come first: where they are wrong the others would divide by zero or repeat them
_SIZES: tuple[Rule, ...] = (
    model.size_problems,
    parallel.size_problems,
    run.size_problems,
    measure.size_problems,
    plan.size_problems,
)
_OTHERS: tuple[Rule, ...] = (
    model.problems,
    recompute.problems,
    offload.problems,
    megatron.problems,
    parallel.problems,
    run.problems,
    measure.problems,
    plan.problems,
    data.problems,
    registered.problems,
)


def validate(config: Config, machine: Machine) -> list[ConfigError]:
    """Every problem of a typed configuration on this machine; empty if it can run."""
    problems = [problem for rule in _SIZES for problem in rule(config, machine)]
    return problems or [problem for rule in _OTHERS for problem in rule(config, machine)]
