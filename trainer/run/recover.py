"""Out of memory in a step: free it all, take the next thriftier plan, and run the same batch again.

A plan changes nothing about a step's result, so the run goes on as if it had had the lower rung from the start. What
is put back are the random generators; gradients are cleared at the start of each step anyway.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memory.plan import Plan
from memory.planner.ladder import Ladder
from trainer.calibration import Calibration
from trainer.config.schema import Config, OptimizerName, PlanSource
from trainer.run import state
from trainer.run.memory import RunMemory
from trainer.run.step import StepOutcome, Stepper

log = logging.getLogger(__name__)

_GIB = 1 << 30


class MemoryExhausted(RuntimeError):
    """Memory ran out on the lowest rung; the weights are those of the last whole step."""


class _PeerFailed(RuntimeError):
    """Another rank ran out of memory in this step."""


class Recovery:
    """Steps that survive running out of memory. Has the place of a Stepper.

    Args:
        make_ladder: the plan in force and thriftier ones, asked for when memory first runs out.
        agrees: ranks tell each other of failures before gradients are reduced. Needs forward and backward passes
            without collectives; otherwise, in a world of several, the error is passed on.
        folder: where each new plan is written.
    """

    def __init__(
        self,
        stepper: Stepper,
        memory: RunMemory,
        make_ladder: Callable[[Plan, Calibration | None], Ladder],
        *,
        agrees: bool,
        folder: Path,
    ) -> None:
        self._stepper, self._memory, self._make_ladder = stepper, memory, make_ladder
        self._agrees, self._folder = agrees, folder
        self._ladder: Ladder | None = None
        #: corrections of the predictions that the ladder goes by
        self.calibration: Calibration | None = None

    def train(self, consumed: int, stop_requested: Callable[[], bool], metered: bool) -> StepOutcome:
        """As Stepper.train. Raises MemoryExhausted when the lowest rung is not low enough."""
        while True:
            generators = state.generators()
            try:
                return self._stepper.train(consumed, stop_requested, metered)
            except _PeerFailed:
                reason = "another rank ran out of memory"
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _out_of_memory(error) or self._stepper.updating or not (self._agrees or _alone()):
                    raise
                reason = str(error).splitlines()[0]
                if not _alone():
                    _any_failed(True)
            # Out here the traceback, and with it the tensors of all its frames, is gone.
            self._step_down(reason)
            state.set_generators(generators)

    @property
    def stepped_down(self) -> bool:
        return self._ladder is not None

    def evaluate(self) -> float:
        return self._stepper.evaluate()

    def parameters_gathered(self) -> contextlib.AbstractContextManager[None]:
        return self._stepper.parameters_gathered()

    def _step_down(self, reason: str) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._ladder is None or self._ladder.current.plan != self._memory.plan_now:
            # the first time, or after the run has gone on to another plan by itself
            self._ladder = self._make_ladder(self._memory.plan_now, self.calibration)
        before, below = self._ladder.current, self._ladder.down()
        if below is None:
            raise MemoryExhausted(
                f"out of memory with the thriftiest plan ({reason}). Take a smaller trainer.micro_batch_size, more "
                "parallel ranks or parallel.distributed_optimizer=true"
            )
        log.warning(
            "out of memory (%s): the same batch again on rung %d of %d, predicted %.2f GiB less and %.1f%% slower",
            reason,
            self._ladder.at,
            len(self._ladder.rungs) - 1,
            (before.peak_bytes - below.peak_bytes) / _GIB,
            100 * (below.step_s / before.step_s - 1),
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            (self._folder / f"plan-rung-{self._ladder.at}.yaml").write_text(below.plan.to_yaml(), encoding="utf-8")
        self._memory.switch(below.plan)


def agrees(config: Config) -> bool:
    """Whether ranks can tell each other of a failed step: their forward and backward passes wait for nobody."""
    parallel = config.parallel
    alone = parallel.tensor * parallel.pipeline * parallel.context == 1 and not parallel.overlap_grad_reduce
    return config.plan.source is PlanSource.auto and alone and config.optim.name is not OptimizerName.none


def agreed(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's finalize_model_grads_func, once all ranks have said that their backward passes are done."""

    def ask_then_finalize(*args: Any, **kwargs: Any) -> Any:
        if not _alone() and _any_failed(False):
            raise _PeerFailed
        return finalize(*args, **kwargs)

    return ask_then_finalize


def _any_failed(failed: bool) -> bool:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    flag = torch.tensor(float(failed), device=device)
    dist.all_reduce(flag)
    return bool(flag.item() > 0)


def _alone() -> bool:
    return dist.get_world_size() == 1


def _out_of_memory(error: BaseException) -> bool:
    """torch's own error on GPUs; the CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
