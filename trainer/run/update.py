"""What happens to the gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Update(Protocol):
    def clear(self) -> None:
        """Before the forward pass: no gradients are left over."""

    @property
    def lr(self) -> float:
        """The learning rate that the next step is taken with."""

    def step(self) -> float | None:
        """After the backward pass. Returns the gradient norm before clipping, where it was computed."""


class MegatronUpdate:
    """Megatron's optimizer and schedule over chunks that DistributedDataParallel wraps."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any, global_batch: int) -> None:
        self._chunks, self._optimizer, self._scheduler = chunks, optimizer, scheduler
        self._global_batch = global_batch

    def clear(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    @property
    def lr(self) -> float:
        return float(max(group["lr"] for group in self._optimizer.param_groups))

    def step(self) -> float | None:
        updated, grad_norm, _ = self._optimizer.step()
        if updated:
            self._scheduler.step(increment=self._global_batch)
        return None if grad_norm is None else float(grad_norm)


class DropGradients:
    """optim=none: forward and backward alone, to measure them; weights stay as they are."""

    lr = 0.0

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks

    def clear(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.clear()
