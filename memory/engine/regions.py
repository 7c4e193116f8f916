"""Regions: spans of modules that run again as a whole in backward, by Megatron's checkpoint (RNG-exact, TP-aware)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import make_viewless_tensor

from memory.engine.door import Books, CountingDoor

Run = Callable[..., torch.Tensor]


def run_region(
    run: Run, *inputs: torch.Tensor, books: Books, on_remake: Callable[[int], None], distribute: bool = False
) -> torch.Tensor:
    """run(*inputs) now without keeping anything inside, again with gradients in backward.

    Source: megatron.core.tensor_parallel.checkpoint. What the second run saves is only counted: it must not be
    stashed again. on_remake gets the bytes of each tensor that it saves.
    """

    def observed(*args: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return run(*args)
        door = CountingDoor(books, remade=True, on_save=on_remake)
        with torch.autograd.graph.saved_tensors_hooks(door.pack, door.unpack):
            return run(*args)

    if distribute and inputs[0].is_leaf:
        # Megatron puts this rank's share in the place of the first input's data. What a pipeline stage has received is
        # a leaf, whose gradient then has another shape than itself and can't be accumulated: share out an alias.
        alias = make_viewless_tensor(inputs[0].view_as(inputs[0]), requires_grad=True, keep_graph=True)
        inputs = (alias, *inputs[1:])
    output: torch.Tensor = tensor_parallel.checkpoint(observed, distribute, *inputs)
    return output
