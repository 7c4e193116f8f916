"""Rules of where the plan comes from. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from memory.options import Granularity, OffloadKind
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import at_least, unused
from trainer.config.schema import Config, Engine, PlanConfig, PlanObjective, PlanSource
from trainer.estimate import check_budget
from trainer.plan import read_plan
from trainer.shape import plans_for_gpu


def size_problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from at_least(config, 1, "plan.processes")
    yield from at_least(config, 0, "plan.max_slowdown", "plan.calibrate_steps")


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    source = config.plan.source
    if source is not PlanSource.file:
        yield from unused(config, f"plan={source.name} reads no file", "Add plan=file or drop it", "plan.path")
    if source is not PlanSource.auto:
        yield from unused(config, "the plan is not sought", "Add plan=auto or drop it", "plan.budget")
        if config.plan.calibrate_steps:
            yield ConfigError(
                "plan.calibrate_steps", "would do nothing: the plan is not sought", "Add plan=auto or drop it"
            )
        if config.plan.objective is not PlanConfig.objective:
            yield ConfigError("plan.objective", "would do nothing: the plan is not sought", "Add plan=auto or drop it")
    if source is PlanSource.options:
        return
    says = "says itself" if source is PlanSource.file else "decides itself"
    if config.recompute.granularity is not Granularity.none:
        yield ConfigError(
            "recompute", f"plan={source.name} {says} what is recomputed", "Write recompute=none or plan=options"
        )
    if config.offload.kind is not OffloadKind.none:
        yield ConfigError(
            "offload", f"plan={source.name} {says} what is offloaded", "Write offload=none or plan=options"
        )
    if source is PlanSource.file:
        try:
            read_plan(config)
        except ConfigError as error:
            yield error
    elif config.engine.name is Engine.stash:
        yield from _auto(config, machine)


def _auto(config: Config, machine: Machine) -> Iterator[ConfigError]:
    plan = config.plan
    if plan.objective is PlanObjective.time and plan.max_slowdown != PlanConfig.max_slowdown:
        yield ConfigError(
            "plan.max_slowdown", "would do nothing: the budget decides", "Add plan.objective=memory or drop it"
        )
    layers, chunks = config.model.num_layers, config.parallel.pipeline * (config.parallel.virtual_pipeline or 1)
    if layers % chunks:
        return  # the rules of the pipeline say so
    # A run takes the device that there is, whatever hardware its options name.
    for_gpu = machine.has_cuda or (config.validate_only and plans_for_gpu(config, False))
    try:
        check_budget(config, for_gpu)
    except ConfigError as error:
        yield error
