"""Which steps a run spends on its baseline: real training steps with everything kept, before the plan acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memory.plan import LayerPlan, Plan, keep_plan
from trainer.config.errors import ConfigError
from trainer.config.schema import BaselineConfig, BaselineMode
from trainer.report.baseline import BASELINE, WARM_UP_STEPS, Choice, NoBaseline, Under, find

#: of a run's steps that may go into the baseline: one in so many
_SHARE = 4
#: of the layers that a plan acts on, those that a probe keeps: one in so many, the first of these that fits
_PROBES = (2, 4, 8, 16, 32, 64, 128)


class LeadIn:
    """Switches to the plan when the baseline has its steps."""

    def __init__(self, choice: Choice, plan: Plan | None, switch: Callable[[Plan], None]) -> None:
        self._choice, self._plan, self._switch = choice, plan, switch
        if choice.lead_in is not None:
            switch(choice.lead_in)

    def under(self, done: int) -> Under:
        """What the step after `done` steps of this run runs under, which it does from here on."""
        if self._choice.lead_in is None or done > self._choice.steps:
            return "plan"
        if done < self._choice.steps:
            return self._choice.under
        assert self._plan is not None
        self._switch(self._plan)
        return "plan"


def choose(
    config: BaselineConfig,
    plan: Plan | None,
    *,
    steps: int,
    resume: str | None,
    fingerprint: Mapping[str, Any],
    fits: Callable[[Plan], bool],
) -> Choice:
    """Decide on the baseline. Collective where `fits` is asked.

    Args:
        plan: what the run is asked to do; None: engine=megatron.
        steps: that this run has to do.
        resume: folder of the run that this one goes on from, whose baseline holds if it has one.
        fits: whether a plan fits this rank.

    Raises:
        ConfigError: baseline=file, and no baseline there is this run's.
    """
    if config.mode is BaselineMode.off:
        return Choice("")
    if config.mode is BaselineMode.file:
        assert config.path is not None
        try:
            return Choice(f"baseline: from {config.path}", stored=find(Path(config.path).expanduser(), fingerprint))
        except NoBaseline as error:
            raise ConfigError(
                "baseline.path", str(error), "Run this setting with recompute=none offload=none, or baseline=auto"
            ) from None
    if plan is None:
        return Choice(
            "no baseline: Megatron's switches act from the first step; baseline=file takes that of a run with "
            "everything kept"
        )
    if plan.idle:
        return Choice("baseline: this run, which keeps everything", is_baseline=True)
    if resume is not None and (Path(resume).expanduser() / BASELINE).is_file():
        try:
            return Choice(f"baseline: that of {resume}", stored=find(Path(resume).expanduser(), fingerprint))
        except NoBaseline:
            pass  # other hardware or versions: measure anew
    spent = WARM_UP_STEPS + config.steps
    if steps < _SHARE * spent:
        return Choice(
            f"no baseline: {spent} of {steps} steps are too many to spend on it; from trainer.steps={_SHARE * spent} "
            "on it is measured in the run, or take one by baseline=file"
        )
    return _lead_in(config, plan, spent, fits)


def _lead_in(config: BaselineConfig, plan: Plan, steps: int, fits: Callable[[Plan], bool]) -> Choice:
    candidates = [(1.0, keep_plan(len(plan.layers)))] if config.mode is BaselineMode.auto else []
    candidates += [keep_some(plan, one_in) for one_in in _PROBES]
    first = _first_on_all_ranks([fits(candidate) for _, candidate in candidates])
    if first is None:
        return Choice("no baseline: by the estimate not even a few layers more could be kept; baseline=file takes one")
    scale, lead_in = candidates[first]
    if scale == 1:
        return Choice(f"baseline: the first {steps} steps keep everything, then the plan acts", lead_in, steps)
    return Choice(
        f"baseline: the first {steps} steps keep 1 in {scale:.3g} of the layers that the plan acts on; keeping all is "
        "estimated from that",
        lead_in,
        steps,
        scale,
    )


def keep_some(plan: Plan, one_in: int) -> tuple[float, Plan]:
    """(scale, plan): one in so many of the layers or spans that the plan acts on are kept, at least one."""
    units = [range(*span) for span in plan.spans]
    units += [range(n, n + 1) for n, layer in enumerate(plan.layers) if not layer.idle and not plan.span_of(n)]
    units.sort(key=lambda unit: unit.start)
    chosen = units[min(one_in, len(units)) - 1 :: one_in]
    kept = {number for unit in chosen for number in unit}
    layers = tuple(LayerPlan() if number in kept else layer for number, layer in enumerate(plan.layers))
    spans = tuple(span for span in plan.spans if span[0] not in kept)
    return sum(map(len, units)) / len(kept), replace(plan, layers=layers, spans=spans)


def _first_on_all_ranks(fitting: Sequence[bool]) -> int | None:
    """The first that fits every rank, the same answer on all. Collective."""
    agreed = torch.tensor(fitting, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return next((index for index, fine in enumerate(agreed.tolist()) if fine), None)
