"""Step after step, with evaluations and checkpoints between, until done, stopped or diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.config.schema import TrainerConfig
from trainer.report.baseline import Under
from trainer.report.observer import EffectRow, Observer, StepRecord
from trainer.run.profile import Profile
from trainer.run.recover import MemoryExhausted
from trainer.run.step import Steps
from trainer.run.stop import GUARD, StopRequest
from trainer.run.watch import Watch


@dataclass(frozen=True)
class RunResult:
    """How a run ended, the same on every rank but for the message."""

    status: Literal["completed", "interrupted", "diverged"]
    #: number of the last step taken
    step: int
    #: of all steps, those before a resume included
    losses: list[float]
    val_loss: float | None
    #: why, for a person; of a stop by the guard only the first rank knows
    message: str


@dataclass(frozen=True)
class Start:
    """Where the loop begins: 0 steps and an empty history, or a checkpoint's."""

    step: int
    consumed_samples: int
    losses: list[float]


def run_loop(
    trainer: TrainerConfig,
    start: Start,
    stepper: Steps,
    observer: Observer,
    *,
    global_batch: int,
    tokens_per_step: int,
    save: Callable[[int, int, list[float]], None],
    effects: Callable[[], Sequence[EffectRow]],
    under: Callable[[int], Under],
    watch: Watch,
    profile: Profile,
    stop: StopRequest,
) -> RunResult:
    """Train from `start` to trainer.steps. Collective.

    Args:
        save: writes a checkpoint of (step, consumed samples, losses so far).
        effects: what the memory options did, asked once after the first step under the plan.
        profile: of a few steps, if any.
        watch: looks closer every so many steps.
        under: what the step after so many of this run's runs under, asked before each.
    """
    step, consumed, losses = start.step, start.consumed_samples, list(start.losses)
    evaluates = trainer.eval_batches > 0
    val_loss: float | None = None
    saved_step = start.step
    told_effects = False

    def save_here() -> None:
        nonlocal saved_step
        if saved_step != step:
            with stepper.parameters_gathered():
                save(step, consumed, losses)
            saved_step = step

    while step < trainer.steps:
        runs_under = under(step - start.step)
        due = watch.due(step + 1)
        try:
            with profile.step(step - start.step):
                outcome = stepper.train(consumed, lambda: stop.signal is not None, metered=due)
        except MemoryExhausted:
            save_here()
            raise
        step += 1
        consumed += global_batch
        losses.append(outcome.loss)
        record = StepRecord(
            step=step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            tokens=tokens_per_step,
            step_s=outcome.step_s,
            forward_s=outcome.times.forward_s,
            backward_s=outcome.times.backward_s,
            optimizer_s=outcome.times.optimizer_s,
            memory=outcome.memory,
            under=runs_under,
        )
        watch.add(record)
        observer.step_done(record)
        if due:
            interval = watch.look(record)
            observer.interval(interval)
            advice = watch.judge(interval)
            if advice:
                observer.advised(step, advice)
                if watch.stops:
                    stop.signal = GUARD
        if runs_under == "plan" and not told_effects:
            told_effects = True
            observer.effects(effects())
        seen = _not_finite(outcome.loss, outcome.grad_norm)
        if seen:
            # no checkpoint: the weights are past mending, and the last one saved is from before
            return RunResult("diverged", step, losses, val_loss, f"step {step}: {seen}")
        if outcome.stop and step < trainer.steps:
            save_here()
            return RunResult(
                "interrupted",
                step,
                losses,
                val_loss,
                f"stopped by {stop.reason}, saved after step {step} of {trainer.steps}",
            )
        if trainer.checkpoint_every and step % trainer.checkpoint_every == 0:
            save_here()
        if evaluates and trainer.eval_every and step % trainer.eval_every == 0 and step < trainer.steps:
            val_loss = stepper.evaluate()
            observer.evaluated(step, val_loss)
    if trainer.checkpoint_every:
        save_here()
    if evaluates:
        val_loss = stepper.evaluate()
        observer.evaluated(step, val_loss)
    return RunResult("completed", step, losses, val_loss, f"{step} steps done")


def _not_finite(loss: float, grad_norm: float | None) -> str:
    """What is wrong with a step's numbers; empty: nothing."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if grad_norm is not None and not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm} at loss {loss}"
    return ""
