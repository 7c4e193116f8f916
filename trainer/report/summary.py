"""What a run came to: the content of result.json, and how it is made of the steps. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import Config
from trainer.report.observer import EffectRow, RunEnd, RunInfo, StepMemory, StepRecord
from trainer.report.throughput import Throughput

#: steps left out of medians: allocators, caches and just-in-time compilers settle there
WARM_UP_STEPS = 3


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
    #: medians over this run's steps, without the first WARM_UP_STEPS
    forward_s: float | None
    backward_s: float | None
    step_s: float | None
    #: largest of all this run's steps
    peak_allocated_bytes: int | None
    peak_saved_bytes: int | None
    #: of the last step
    kept_bytes: int | None
    offloaded_bytes: int | None
    recomputed_bytes: int | None
    rss_bytes: int | None
    effects: Sequence[EffectRow]
    model: str
    recompute: str
    offload: str
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


@dataclass
class Tally:
    """Collects what a Summary needs of each step: a few floats, however long the run."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    peak_saved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    last: StepMemory | None = None
    val_loss: float | None = None
    effects: Sequence[EffectRow] = ()

    def add(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.step_s.append(record.step_s)
        self.forward_s.append(record.forward_s)
        self.backward_s.append(record.backward_s)
        self.last = record.memory
        self.peak_saved_bytes = _larger(self.peak_saved_bytes, record.memory.peak_saved_bytes)
        self.peak_allocated_bytes = _larger(self.peak_allocated_bytes, record.memory.peak_allocated_bytes)


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
    step_s = _median(tally.step_s)
    tokens_per_s = info.tokens_per_step / step_s if info and step_s else None
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
        forward_s=_median(tally.forward_s),
        backward_s=_median(tally.backward_s),
        step_s=step_s,
        peak_allocated_bytes=tally.peak_allocated_bytes,
        peak_saved_bytes=tally.peak_saved_bytes,
        kept_bytes=last.kept_bytes if last else None,
        offloaded_bytes=last.offloaded_bytes if last else None,
        recomputed_bytes=last.recomputed_bytes if last else None,
        rss_bytes=last.rss_bytes if last else None,
        effects=tuple(tally.effects),
        model=config.model.name,
        recompute=config.recompute.granularity.value,
        offload=config.offload.kind.value,
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


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values[min(WARM_UP_STEPS, len(values) - 1) :]) if values else None


def _larger(a: int | None, b: int | None) -> int | None:
    return max((x for x in (a, b) if x is not None), default=None)
