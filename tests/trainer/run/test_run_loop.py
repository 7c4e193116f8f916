from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.run.run_recorder import Recorder
from trainer.config.schema import ProfileConfig, TrainerConfig
from trainer.report.observer import Advice, StepMemory, StepRecord
from trainer.run.clock import StepTimes
from trainer.run.loop import RunResult, Start, run_loop
from trainer.run.profile import Profile
from trainer.run.step import StepOutcome
from trainer.run.stop import StopRequest


class Scripted:
    """A stepper whose step n has loss 1/n, but for the losses and norms given by step."""

    def __init__(
        self, losses: dict[int, float] | None = None, norms: dict[int, float] | None = None, first: int = 1
    ) -> None:
        self.consumed: list[int] = []
        self.gathered = False
        self.within: Callable[[int], None] = lambda step: None
        self._first, self._losses, self._norms = first, losses or {}, norms or {}

    def train(self, consumed: int, stop_requested: Callable[[], bool], metered: bool) -> StepOutcome:
        step = self._first + len(self.consumed)
        self.consumed.append(consumed)
        self.within(step)
        loss, norm = self._losses.get(step, 1 / step), self._norms.get(step, 1.0)
        return StepOutcome(
            loss, norm, 0.1, 3.0, StepTimes(1.0, 2.0, 0.5), StepMemory(1, 2, 3, 4, None, 5), stop_requested()
        )

    def evaluate(self) -> float:
        return 100.0 + len(self.consumed)

    @contextlib.contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        self.gathered = True
        yield
        self.gathered = False


class Looks:
    """A watch that is due every third step and sees the number of the step."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.advises_at = 0
        self.stops = False

    def due(self, step: int) -> bool:
        return step % 3 == 0

    def add(self, record: StepRecord) -> None:
        self.added.append(record.step)

    def look(self, record: StepRecord) -> int:
        return record.step

    def judge(self, interval: int) -> list[Advice]:
        return [Advice("peak", "too much", "do less")] if interval == self.advises_at else []


class Ran:
    def __init__(
        self,
        stepper: Scripted,
        start: Start = Start(0, 0, []),
        stop_after: int | None = None,
        stop_within: int | None = None,
        lead_in: int = 0,
        advises_at: int = 0,
        stops: bool = False,
        **trainer: Any,
    ) -> None:
        self.saved: list[tuple[int, int, int]] = []
        stop = StopRequest()

        def on_step(step: int) -> None:
            if step == stop_after:
                stop.signal = "SIGTERM"

        def within(step: int) -> None:
            if step == stop_within:
                stop.signal = "SIGTERM"

        stepper.within = within

        def save(step: int, consumed: int, losses: list[float]) -> None:
            assert stepper.gathered
            self.saved.append((step, consumed, len(losses)))

        self.watcher, self.watch = Recorder(on_step), Looks()
        self.watch.advises_at, self.watch.stops = advises_at, stops
        self.end: RunResult = run_loop(
            TrainerConfig(**trainer),
            start,
            stepper,  # type: ignore[arg-type]
            self.watcher,
            global_batch=10,
            tokens_per_step=160,
            save=save,
            effects=lambda: (),
            profile=Profile(ProfileConfig(), [], Path(), rank=0, lead_in=0, steps=1),
            watch=self.watch,  # type: ignore[arg-type]
            under=lambda done: "keep" if done < lead_in else "plan",
            stop=stop,
        )


def test_it_is_looked_at_when_due() -> None:
    ran = Ran(Scripted(), steps=7, eval_batches=0)
    assert ran.watch.added == [1, 2, 3, 4, 5, 6, 7]
    assert ran.watcher.intervals == [3, 6]  # type: ignore[comparison-overlap]


def test_advice_is_told_and_stops_the_run_where_the_guard_says_so() -> None:
    warned = Ran(Scripted(), advises_at=3, steps=7, eval_batches=0)
    assert warned.watcher.advice == [(3, Advice("peak", "too much", "do less"))]
    assert warned.end.status == "completed"
    stopped = Ran(Scripted(), advises_at=3, stops=True, steps=7)
    # as after a signal: the next step notices
    assert (stopped.end.status, stopped.end.step) == ("interrupted", 4)
    assert stopped.end.message == "stopped by the guard, saved after step 4 of 7"
    assert stopped.saved == [(4, 40, 4)]


def test_a_plain_run() -> None:
    ran = Ran(stepper := Scripted(), steps=4, eval_batches=1)
    assert ran.end == RunResult("completed", 4, [1, 1 / 2, 1 / 3, 1 / 4], 104.0, "4 steps done")
    assert stepper.consumed == [0, 10, 20, 30]
    assert ran.saved == []
    assert ran.watcher.evaluations == [(4, 104.0)]
    assert ran.watcher.effects_after == [1]
    record = ran.watcher.steps[1]
    assert (record.step, record.loss, record.tokens) == (2, 0.5, 160)
    assert (record.step_s, record.forward_s, record.backward_s, record.optimizer_s) == (3.0, 1.0, 2.0, 0.5)


def test_evaluations_and_checkpoints_have_their_own_rhythm() -> None:
    ran = Ran(Scripted(), steps=7, eval_every=3, checkpoint_every=2)
    assert ran.watcher.evaluations == [(3, 103.0), (6, 106.0), (7, 107.0)]
    assert ran.saved == [(2, 20, 2), (4, 40, 4), (6, 60, 6), (7, 70, 7)]
    assert [step for step, _, _ in Ran(Scripted(), steps=4, checkpoint_every=2).saved] == [2, 4]


def test_no_evaluation_at_all() -> None:
    ran = Ran(Scripted(), steps=2, eval_batches=0)
    assert ran.end.val_loss is None and ran.watcher.evaluations == []


def test_a_start_in_the_middle() -> None:
    ran = Ran(stepper := Scripted(first=3), Start(2, 25, [9.0, 8.0]), steps=4, eval_batches=0)
    assert ran.end.losses == [9.0, 8.0, 1 / 3, 1 / 4]
    assert stepper.consumed == [25, 35]
    assert ran.watcher.effects_after == [3]


def test_a_stop_is_noticed_by_the_next_step_and_saved_once() -> None:
    ran = Ran(Scripted(), stop_after=3, steps=9, checkpoint_every=4)
    assert (ran.end.status, ran.end.step, ran.end.val_loss) == ("interrupted", 4, None)
    assert ran.saved == [(4, 40, 4)]
    assert "after step 4 of 9" in ran.end.message


def test_a_stop_that_comes_within_a_step_ends_with_it() -> None:
    assert Ran(Scripted(), stop_within=3, steps=9).saved == [(3, 30, 3)]


def test_a_stop_in_the_last_step_is_a_completed_run() -> None:
    ran = Ran(Scripted(), stop_after=3, steps=4)
    assert (ran.end.status, ran.end.val_loss) == ("completed", 104.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_without_saving(loss: float) -> None:
    ran = Ran(Scripted({3: loss}), steps=9, checkpoint_every=3)
    assert (ran.end.status, ran.end.step) == ("diverged", 3)
    assert ran.end.message == f"step 3: the loss is {loss}"
    assert ran.saved == [] and len(ran.end.losses) == 3 and len(ran.watcher.steps) == 3


def test_so_does_a_gradient() -> None:
    ran = Ran(Scripted(norms={2: math.inf}), steps=9)
    assert ran.end.status == "diverged" and ran.end.message == "step 2: the gradient norm is inf at loss 0.5"


def test_steps_say_what_they_ran_under_and_effects_wait_for_the_plan() -> None:
    ran = Ran(Scripted(first=3), Start(2, 20, [9.0, 8.0]), lead_in=2, steps=6, eval_batches=0)
    assert [(record.step, record.under) for record in ran.watcher.steps] == [
        (3, "keep"),
        (4, "keep"),
        (5, "plan"),
        (6, "plan"),
    ]
    assert ran.watcher.effects_after == [5]
