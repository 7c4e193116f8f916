"""What a configuration will take in memory and time, before it runs; with plan=auto also the plan. Imports no torch.

The figures are memory/planner's, out of the stages that trainer/pipeline.py makes of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from memory.plan import Plan
from memory.planner.ladder import Ladder, ladder_below
from memory.planner.pipeline import Decision, Prediction, decide, frontier, predict, smallest_peak_bytes, thriftiest
from memory.planner.solve import Infeasible
from trainer.calibration import Calibration
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, PlanObjective
from trainer.pipeline import Setting, known_hardware, make_setting
from trainer.report.units import bytes_text

_GIB = 1 << 30
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": _GIB, "TiB": 1 << 40}
#: plans below the one in force, for when memory runs out all the same
_RUNGS = 6
#: budgets in the table of what memory costs
_PRICES = 7
#: shares of a step from which on a limit is said to bind
_BINDS = 0.002


@dataclass(frozen=True)
class Estimate:
    """A prediction and where it comes from."""

    setting: Setting
    prediction: Prediction
    keep: Prediction
    #: None: the plan was given, not sought
    decision: Decision | None
    budget_bytes: int | None


def parse_budget(text: str, memory_gib: float | None) -> int:
    """Bytes of `70GiB`, `800MiB` or `0.9` (of the device's memory). Raises ConfigError."""
    remedy = "Write it as plan.budget=70GiB, 800MiB or 0.9 (a share of the device's memory)"
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]iB|B)?\s*", text)
    try:
        number = float(found.group(1)) if found else -1.0
    except ValueError:
        number = -1.0
    if found is None or number <= 0:
        raise ConfigError("plan.budget", f"{text} is no amount of memory", remedy)
    if found.group(2):
        return int(number * _UNITS[found.group(2)])
    if number > 1:
        raise ConfigError("plan.budget", f"{text} has no unit, and is no share of one", remedy)
    if memory_gib is None:
        raise ConfigError(
            "plan.budget",
            f"{text} is a share of the device's memory, which is not known",
            "Write it with a unit as in plan.budget=8GiB, choose hardware=..., or set hardware.memory_gib",
        )
    return int(number * memory_gib * _GIB)


#: decisions of this process, by all that they depend on
_DECIDED: dict[tuple[str, Setting], Decision | ConfigError] = {}


def auto_decision(config: Config, has_cuda: bool, calibration: Calibration | None = None) -> Decision:
    """The plan of plan=auto. Raises ConfigError where none fits, with the smallest budget that one would fit."""
    setting = make_setting(config, has_cuda, calibration)
    key = (repr(config.plan), setting)
    if key not in _DECIDED:
        try:
            _DECIDED[key] = _decide(config, setting)
        except ConfigError as error:
            _DECIDED[key] = error
    decided = _DECIDED[key]
    if isinstance(decided, ConfigError):
        raise decided
    return decided


def budget_bytes(config: Config, has_cuda: bool) -> int:
    """Raises ConfigError where plan.budget is no amount."""
    return parse_budget(config.plan.budget or "0.9", known_hardware(config.hardware, has_cuda).memory_gib)


def _decide(config: Config, setting: Setting) -> Decision:
    if config.plan.objective is PlanObjective.memory:
        return thriftiest(setting.pipeline, config.plan.max_slowdown)
    budget = parse_budget(config.plan.budget or "0.9", setting.hardware.memory_gib)
    try:
        return decide(setting.pipeline, budget)
    except Infeasible as error:
        raise _too_small(budget, error.smallest_bytes) from None


def check_budget(config: Config, has_cuda: bool) -> None:
    """Raises ConfigError where auto_decision would, without seeking the best plan."""
    setting = make_setting(config, has_cuda)
    if config.plan.objective is PlanObjective.memory:
        return
    budget = parse_budget(config.plan.budget or "0.9", setting.hardware.memory_gib)
    if setting.pipeline.keep.peak_bytes > budget:
        smallest = smallest_peak_bytes(setting.pipeline)
        if smallest > budget:
            raise _too_small(budget, smallest)


def _too_small(budget: int, smallest_bytes: int) -> ConfigError:
    unit = next(name for name in ("GiB", "MiB", "KiB") if smallest_bytes >= _UNITS[name] or name == "KiB")
    # rounded up, so that what is proposed fits
    smallest = f"{-(-smallest_bytes * 100 // _UNITS[unit]) / 100:.2f}{unit}"
    return ConfigError(
        "plan.budget",
        f"no plan fits {bytes_text(budget)}: the smallest budget that one was found for is {smallest}",
        f"Write plan.budget={smallest}, or take a smaller trainer.micro_batch_size, "
        "more parallel ranks, or parallel.distributed_optimizer=true",
    )


def auto_ladder(config: Config, has_cuda: bool, plan: Plan, calibration: Calibration | None = None) -> Ladder:
    """The plan in force and thriftier ones below it."""
    return ladder_below(make_setting(config, has_cuda, calibration).pipeline, plan, _RUNGS)


def estimate(config: Config, plan: Plan, has_cuda: bool) -> Estimate:
    """The prediction for a plan; where the configuration seeks one, for what it found."""
    setting = make_setting(config, has_cuda)
    decision, budget = None, None
    if config.plan.source.name == "auto":
        decision = auto_decision(config, has_cuda)
        budget = budget_bytes(config, has_cuda) if config.plan.objective is PlanObjective.time else None
    prediction = decision.prediction if decision else predict(setting.pipeline, plan)
    return Estimate(setting, prediction, setting.pipeline.keep, decision, budget)


def as_json(found: Estimate) -> dict[str, Any]:
    """What estimate.json holds. Bytes and seconds are of one rank and one step."""
    prediction, setting = found.prediction, found.setting
    worst = prediction.simulations[prediction.worst]
    micro_batches = setting.pipeline.stages[0].micro_batches
    return {
        "peak_bytes": prediction.peak_bytes,
        "by_category": dict(worst.by_category),
        "step_s": prediction.step_s,
        "mfu": setting.mfu(prediction.step_s),
        "offloaded_bytes": micro_batches * sum(s.offloaded_bytes for s in prediction.simulations),
        "plan": yaml.safe_load(prediction.plan.to_yaml()),
        "budget_bytes": found.budget_bytes,
        "lower_bound_s": found.decision.lower_bound_s if found.decision else None,
        "found_by": found.decision.found_by if found.decision else None,
        "keep": {"peak_bytes": found.keep.peak_bytes, "step_s": found.keep.step_s},
        "stages": [
            {
                "peak_bytes": s.peak_bytes,
                "by_category": dict(s.by_category),
                "peak_at": _place(s.peak_at),
                "micro_batch_s": s.micro_batch_s,
                "offloaded_bytes": micro_batches * s.offloaded_bytes,
                "host_bytes": s.host_bytes,
            }
            for s in prediction.simulations
        ],
        "processes": setting.processes,
        "assumptions": list(setting.assumptions),
    }


def lines(found: Estimate) -> Iterator[str]:
    """The estimate for a person."""
    prediction, keep, setting = found.prediction, found.keep, found.setting
    yield f"Estimate for {setting.processes} x {setting.hardware.name} (GiB on one rank, one optimizer step)"
    categories = [name for name in prediction.simulations[0].by_category if _any_bytes(prediction, name)]
    table = [["stage", "peak", *categories, "peak at", "to host"]]
    for rank, simulation in enumerate(prediction.simulations):
        parts = [f"{simulation.by_category[name] / _GIB:.2f}" for name in categories]
        sent = f"{setting.pipeline.stages[0].micro_batches * simulation.offloaded_bytes / _GIB:.2f}"
        table.append([str(rank), f"{simulation.peak_bytes / _GIB:.2f}", *parts, _place(simulation.peak_at), sent])
    yield from _aligned(table)
    slower = prediction.step_s / keep.step_s - 1
    yield (
        f"step {prediction.step_s * 1e3:.1f} ms, MFU {setting.mfu(prediction.step_s):.1%}; keeping everything: "
        f"{keep.step_s * 1e3:.1f} ms, {keep.peak_bytes / _GIB:.2f} GiB; the plan is {slower:.1%} slower"
    )
    if found.decision:
        yield from _why(found)
    for assumption in setting.assumptions:
        yield f"assumed: {assumption}"


def _why(found: Estimate) -> Iterator[str]:
    prediction, decision = found.prediction, found.decision
    assert decision
    bound = decision.lower_bound_s / found.keep.step_s - 1
    yield f"found by {decision.found_by}; no plan can do better than {bound:.1%} slower (link and recomputation alone)"
    slow = prediction.simulations[prediction.slowest]
    costs = {
        "recomputation": slow.remake_s,
        "waiting for copies to the host": slow.stall_out_s,
        "waiting for copies back": slow.stall_back_s,
    }
    paid = [f"{name} {s / slow.micro_batch_s:.1%}" for name, s in costs.items() if s > _BINDS * slow.micro_batch_s]
    worst = prediction.simulations[prediction.worst]
    yield (
        f"binding: memory at {_place(worst.peak_at)} of stage {prediction.worst}"
        + (f"; paid with {', '.join(paid)}" if paid else "; nothing is paid for it")
        if prediction.plan != found.keep.plan
        else "binding: nothing, everything can be kept"
    )
    yield "What memory costs:"
    yield from _aligned(_prices(found))


def _prices(found: Estimate) -> list[list[str]]:
    """Peaks from cheap to thrifty, with what each GiB less than the one before costs."""
    table = [["peak GiB", "step ms", "slower", "ms for each GiB less"]]
    rungs = frontier(found.setting.pipeline, _PRICES)
    if found.decision:
        rungs = sorted([*rungs, found.decision.prediction], key=lambda p: -p.peak_bytes)
    before = None
    for rung in rungs:
        if before is not None and rung.peak_bytes == before.peak_bytes:
            continue
        price = ""
        if before is not None:
            price = f"{(rung.step_s - before.step_s) * 1e3 / ((before.peak_bytes - rung.peak_bytes) / _GIB):.2f}"
        mark = " <" if found.decision and rung is found.decision.prediction else ""
        table.append(
            [
                f"{rung.peak_bytes / _GIB:.2f}{mark}",
                f"{rung.step_s * 1e3:.1f}",
                f"{rung.step_s / found.keep.step_s - 1:.1%}",
                price,
            ]
        )
        before = rung
    return table


def _any_bytes(prediction: Prediction, name: str) -> bool:
    return any(simulation.by_category[name] for simulation in prediction.simulations)


def _place(peak_at: tuple[str, int]) -> str:
    phase, layer = peak_at
    if phase == "forward" and layer < 0:
        return "end of forward"
    return phase if layer < 0 else f"{phase} of layer {layer}"


def _aligned(table: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
