"""What a run came to: the content of result.json, and how it is made of the steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import Config, PlanSource
from trainer.report.baseline import WARM_UP_STEPS, Baseline, Choice, Delta, Figures, delta, estimated, settled_median
from trainer.report.observer import Advice, EffectRow, Interval, RunEnd, RunInfo, StepMemory, StepRecord
from trainer.report.throughput import Throughput


@dataclass(frozen=True)
class Summary:
    """The keys of result.json, in order. None stands for what was not measured, or not a finite number."""

    status: str
    message: str
    #: done in all, also before a resume
    steps: int
    #: one a step, also those before a resume
    losses: Sequence[float]
    val_loss: float | None
    tokens_per_s: float | None
    #: share of 1
    mfu: float | None
    #: medians over this run's steps under its plan, without the first WARM_UP_STEPS
    forward_s: float | None
    backward_s: float | None
    step_s: float | None
    #: largest of this run's steps under its plan
    peak_allocated_bytes: int | None
    peak_saved_bytes: int | None
    #: of the last step
    kept_bytes: int | None
    offloaded_bytes: int | None
    recomputed_bytes: int | None
    rss_bytes: int | None
    #: the same with everything kept; None: there is none
    baseline: Baseline | None
    #: the plan over its baseline
    delta: Delta | None
    effects: Sequence[EffectRow]
    advice: Sequence[Advice]
    model: str
    recompute: str
    offload: str
    #: where the plan came from: options (those two), file or auto
    plan: str
    engine: str
    parameters: int | None
    tokens_per_step: int | None
    flops_per_token: float | None
    world_size: int | None
    #: UTC, ISO 8601
    started_at: str
    ended_at: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]

    @property
    def memory_options(self) -> str:
        """What decided over each tensor."""
        chosen = f"recompute={self.recompute} offload={self.offload}"
        return chosen if self.plan == PlanSource.options.value else f"plan={self.plan}"


@dataclass
class Steps:
    """Collects what Figures need: a few floats a step, however long the run."""

    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_saved_bytes: int | None = None
    peak_allocated_bytes: int | None = None

    def add(self, record: StepRecord) -> None:
        self.step_s.append(record.step_s)
        self.forward_s.append(record.forward_s)
        self.backward_s.append(record.backward_s)
        self.optimizer_s.append(record.optimizer_s)
        self.peak_saved_bytes = _larger(self.peak_saved_bytes, record.memory.peak_saved_bytes)
        self.peak_allocated_bytes = _larger(self.peak_allocated_bytes, record.memory.peak_allocated_bytes)

    def figures(self) -> Figures | None:
        """None before the first step."""
        if not self.step_s or self.peak_saved_bytes is None:
            return None
        return Figures(
            settled_median(self.step_s),
            settled_median(self.forward_s),
            settled_median(self.backward_s),
            settled_median(self.optimizer_s),
            self.peak_saved_bytes,
            self.peak_allocated_bytes,
        )


@dataclass
class Tally:
    """Collects what a Summary needs of the steps."""

    losses: list[float] = field(default_factory=list)
    plan: Steps = field(default_factory=Steps)
    #: the steps before the plan was switched on
    lead_in: Steps = field(default_factory=Steps)
    last: StepMemory | None = None
    #: the last interval under the plan, and the last before it
    last_interval: Interval | None = None
    lead_in_interval: Interval | None = None
    val_loss: float | None = None
    effects: Sequence[EffectRow] = ()
    advice: list[Advice] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.last = record.memory
        (self.plan if record.under == "plan" else self.lead_in).add(record)

    def note(self, interval: Interval) -> None:
        if interval.under == "plan":
            self.last_interval = interval
        else:
            self.lead_in_interval = interval

    def is_first_under_plan(self, record: StepRecord) -> bool:
        return record.under == "plan" and len(self.plan.step_s) == 1

    @property
    def settled(self) -> bool:
        """There are steps under the plan beyond its warm-up."""
        return len(self.plan.step_s) > WARM_UP_STEPS

    def baseline(self, choice: Choice) -> Baseline | None:
        """As far as it is known by now."""
        plan, lead_in = self.plan.figures(), self.lead_in.figures()
        if choice.stored is not None:
            return choice.stored
        if choice.is_baseline and plan is not None:
            return Baseline("measured", plan)
        if lead_in is None or plan is None:
            return None
        if choice.scale == 1:
            return Baseline("measured", lead_in)
        return Baseline("estimated", estimated(lead_in, plan, choice.scale))


def summarise(
    config: Config,
    tally: Tally,
    end: RunEnd,
    info: RunInfo | None,
    throughput: Throughput | None,
    hardware: Mapping[str, Any],
    started_at: str,
    ended_at: str,
) -> Summary:
    """`info` and `throughput` are None when the run failed before its first step was ready."""
    figures = tally.plan.figures()
    tokens_per_s = info.tokens_per_step / figures.step_s if info and figures else None
    baseline = tally.baseline(info.baseline) if info else None
    losses = [*(info.earlier_losses if info else ()), *tally.losses]
    last = tally.last
    return Summary(
        status=end.status,
        message=end.message,
        steps=(info.first_step - 1 if info else 0) + len(tally.losses),
        losses=losses,
        val_loss=tally.val_loss if end.val_loss is None else end.val_loss,
        tokens_per_s=tokens_per_s,
        mfu=throughput.mfu(tokens_per_s) if throughput and tokens_per_s else None,
        forward_s=figures.forward_s if figures else None,
        backward_s=figures.backward_s if figures else None,
        step_s=figures.step_s if figures else None,
        peak_allocated_bytes=figures.peak_allocated_bytes if figures else None,
        peak_saved_bytes=figures.peak_saved_bytes if figures else None,
        kept_bytes=last.kept_bytes if last else None,
        offloaded_bytes=last.offloaded_bytes if last else None,
        recomputed_bytes=last.recomputed_bytes if last else None,
        rss_bytes=last.rss_bytes if last else None,
        baseline=baseline,
        delta=delta(figures, baseline.figures) if figures and baseline else None,
        effects=tuple(tally.effects),
        advice=tuple(tally.advice),
        model=config.model.name,
        recompute=config.recompute.granularity.value,
        offload=config.offload.kind.value,
        plan=config.plan.source.value,
        engine=config.engine.name.value,
        parameters=info.parameters if info else None,
        tokens_per_step=info.tokens_per_step if info else None,
        flops_per_token=info.flops_per_token if info else None,
        world_size=info.world_size if info else None,
        started_at=started_at,
        ended_at=ended_at,
        versions=dict(info.versions) if info else {},
        hardware=dict(hardware),
    )


def _larger(a: int | None, b: int | None) -> int | None:
    return max((x for x in (a, b) if x is not None), default=None)
