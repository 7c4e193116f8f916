"""One optimizer step and one evaluation, by Megatron's schedules."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.report.observer import StepMemory
from trainer.run.clock import OPTIMIZER, StepClock, StepTimes
from trainer.run.data.batches import Batch, Batches
from trainer.run.memory import RunMemory
from trainer.run.update import Update


@dataclass(frozen=True)
class StepOutcome:
    """One finished step, the same on every rank but for times and memory."""

    loss: float
    #: before clipping; None without clipping, for which alone Megatron computes it
    grad_norm: float | None
    #: the rate that the step was taken with
    lr: float
    step_s: float
    times: StepTimes
    memory: StepMemory
    #: some rank was asked to stop
    stop: bool


class Steps(Protocol):
    """What a run's loop needs: Stepper, or what stands in front of one."""

    def train(self, consumed: int, stop_requested: Callable[[], bool], metered: bool) -> StepOutcome: ...

    def evaluate(self) -> float: ...

    def parameters_gathered(self) -> contextlib.AbstractContextManager[None]: ...


class Stepper:
    """Runs the steps of one built model.

    Args:
        chunks: this stage's model chunks, wrapped for training.
        seq_length: tokens of a sequence, before context parallelism shares it out.
        gathers_late: parameters are gathered during the next forward (parallel.overlap_param_gather).
    """

    def __init__(
        self,
        *,
        chunks: Sequence[torch.nn.Module],
        update: Update,
        clock: StepClock,
        batches: Batches,
        seq_length: int,
        memory: RunMemory,
        gathers_late: bool,
        device: torch.device,
    ) -> None:
        self._chunks: list[Any] = list(chunks)
        self._update = update
        self._clock = clock
        self._batches = batches
        self._seq_length = seq_length
        self._memory = memory
        self._gathers_late = gathers_late
        self._device = device
        self._forward_backward = get_forward_backward_func()
        #: the optimizer is at work on the weights: a step that fails now can't be repeated
        self.updating = False

    def train(self, consumed: int, stop_requested: Callable[[], bool], metered: bool) -> StepOutcome:
        """The step that follows `consumed` samples; this rank's wish to stop is asked for at its end.

        metered: copies over the link are timed.
        """
        began = time.perf_counter()
        # of a step that failed
        self._clock.drop()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._memory.begin_step(metered)
        for chunk in self._chunks:
            chunk.train()
        self._update.clear()
        losses = self._run(lambda: self._batches.train(consumed), self._batches.shape.micro_batches, forward_only=False)
        lr = self._update.lr
        timer = self._clock(OPTIMIZER)
        timer.start()
        self.updating = True
        grad_norm = self._update.step()
        self.updating = False
        timer.stop()
        loss, stop = self._agree(losses, stop_requested())
        return StepOutcome(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_s=time.perf_counter() - began,
            times=self._clock.read(),
            memory=self._memory_of_step(),
            stop=stop,
        )

    def evaluate(self) -> float:
        """Mean loss per token of the held-out micro-batches, without dropout."""
        with self.parameters_gathered(), torch.no_grad():
            for chunk in self._chunks:
                chunk.eval()
            losses = self._run(self._batches.held_out, self._batches.eval_batches, forward_only=True)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums += torch.stack([torch.stack([total.double(), tokens.double()]) for total, tokens in losses]).sum(dim=0)
        total, tokens = self._sum_over_world(sums).tolist()
        # An evaluation's times are nobody's, but its events can't be read before the wait that tolist() was.
        self._clock.read()
        return float(total / tokens)

    @contextlib.contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """Within, every rank holds whole, current parameters, also where they are otherwise gathered during forward."""
        if self._gathers_late:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        yield
        if self._gathers_late:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()

    def _run(
        self, batches: Callable[[], Iterator[Batch]], micro_batches: int, forward_only: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Megatron's schedule over `micro_batches`; on the last stage each one's summed loss and number of tokens."""
        several = len(self._chunks) > 1
        results: list[tuple[torch.Tensor, torch.Tensor]] = self._forward_backward(
            forward_step_func=_forward_step,
            data_iterator=[batches() for _ in self._chunks] if several else batches(),
            model=self._chunks if several else self._chunks[0],
            num_microbatches=micro_batches,
            seq_length=self._seq_length,
            micro_batch_size=self._batches.shape.micro_batch,
            forward_only=forward_only,
        )
        return results

    def _agree(self, losses: list[tuple[torch.Tensor, torch.Tensor]], stop_requested: bool) -> tuple[float, bool]:
        """The step's loss, and whether any rank was asked to stop, on every rank.

        The loss is the mean of micro-batch means, as it was differentiated. Reading it is the step's one wait for the
        device besides Megatron's own for the gradient norm.
        """
        facts = torch.zeros(2, dtype=torch.float64, device=self._device)
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
            ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            facts[0] = torch.stack([total / tokens for total, tokens in losses]).double().mean() / ranks
        facts[1] = float(stop_requested)
        facts = self._sum_over_world(facts)
        loss, stops = facts.float().tolist()
        return loss, stops > 0

    def _sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        return values

    def _memory_of_step(self) -> StepMemory:
        counted = self._memory.end_step()
        return StepMemory(
            peak_saved_bytes=counted.peak_saved_bytes,
            kept_bytes=counted.kept_bytes,
            offloaded_bytes=counted.offloaded_bytes,
            recomputed_bytes=counted.recomputed_bytes,
            peak_allocated_bytes=torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None,
            rss_bytes=psutil.Process().memory_info().rss,
        )


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: output of the chunk, and what makes a loss of it on the last stage."""
    batch = next(batches)
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
    return output, partial(_token_loss, batch.loss_mask)


def _token_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Summed loss and number of tokens, of which Megatron makes the mean; losses and mask are [batch, seq].

    Megatron divides the sum in place, so what is reported is a copy.
    """
    total = (losses.float() * mask).sum()
    tokens = mask.sum().int()
    return total, tokens, (total.detach().clone(), tokens)
