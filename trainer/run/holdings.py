"""What lies in a rank's memory between steps, by what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Holdings:
    """Bytes on the device, every storage counted once."""

    weights_bytes: int
    gradients_bytes: int
    #: moments, and the fp32 copies of the weights that it updates
    optimizer_bytes: int


def holdings(chunks: Sequence[Any], optimizer: Any) -> Holdings:
    """Of the wrapped model chunks and Megatron's optimizer; None: optim=none, gradients are as wide as weights.

    Sources: DistributedDataParallel.buffers (param_data, grad_data), MegatronOptimizer.optimizer.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    seen: set[int] = set()
    weights = _new_bytes(parameters, seen)
    if optimizer is None:
        return Holdings(weights, weights, 0)
    gradients = _new_bytes(_gradients(chunks), seen)
    return Holdings(weights, gradients, _new_bytes(_states(optimizer), seen))


def _gradients(chunks: Sequence[Any]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _states(optimizer: Any) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages that nobody has counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
