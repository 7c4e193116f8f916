from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.report.observer import Advice, EffectRow, Interval, RunEnd, RunInfo, StepRecord


class Recorder:
    """An observer that remembers; `on_step` may act between steps as a signal from outside would."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        self._on_step = on_step
        self.info: RunInfo | None = None
        self.steps: list[StepRecord] = []
        self.evaluations: list[tuple[int, float]] = []
        self.intervals: list[Interval] = []
        self.advice: list[tuple[int, Advice]] = []
        self.effects_after: list[int] = []
        self.ends: list[RunEnd] = []

    def run_started(self, info: RunInfo) -> None:
        self.info = info

    def step_done(self, record: StepRecord) -> None:
        self.steps.append(record)
        self._on_step(record.step)

    def effects(self, rows: Sequence[EffectRow]) -> None:
        self.effects_after.append(self.steps[-1].step)

    def interval(self, interval: Interval) -> None:
        self.intervals.append(interval)

    def advised(self, step: int, advice: Sequence[Advice]) -> None:
        self.advice += [(step, one) for one in advice]

    def evaluated(self, step: int, val_loss: float) -> None:
        self.evaluations.append((step, val_loss))

    def run_ended(self, end: RunEnd) -> None:
        self.ends.append(end)
