"""Whether a plan's step fits the device, by closed forms over what is already there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from megatron.core import parallel_state

from memory.plan import Plan
from memory.sites import SITES
from trainer.config.schema import Config, OptimizerName
from trainer.shape import layer_shape, loss_head_bytes

#: of the free memory that an estimate may fill: closed forms know nothing of kernels' workspaces and fragmentation
_MARGIN = 0.85
#: Adam's two moments in fp32; SGD's one
_STATE_BYTES = {OptimizerName.adam: 8, OptimizerName.sgd: 4, OptimizerName.none: 0}


def fits(plan: Plan, config: Config, vocab_size: int, chunks: Iterable[Any]) -> bool:
    """Whether steps under this plan fit what is free on this rank, before the first one has made optimizer states.

    Counts what the layers and the loss head keep for as many micro-batches as are in flight (1F1B), one layer's
    gradients, and what optimizer and gradients still have to allocate.
    """
    has_cuda = torch.cuda.is_available()
    shape, parallel = layer_shape(config, has_cuda), config.parallel
    modules = list(chunks)
    layers = [layer.layer_number - 1 for chunk in modules for layer in chunk.decoder.layers]
    in_flight = parallel.pipeline - parallel_state.get_pipeline_model_parallel_rank()
    parameters = sum(parameter.numel() for chunk in modules for parameter in chunk.parameters())
    states = parameters * _STATE_BYTES[config.optim.name]
    if parallel.distributed_optimizer:
        states //= parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    gradients = parameters * shape.element_bytes if config.optim.name is OptimizerName.none else 0
    padded = config.model.padded_vocab_size(vocab_size, parallel.tensor)
    loss = loss_head_bytes(config, shape, padded)
    one_layer = sum(site.bytes_of(shape) for site in SITES.values())
    saved = in_flight * (plan.kept_bytes(shape, layers) + loss.kept)
    return saved + loss.transient + one_layer + states + gradients < _MARGIN * _free_bytes()


def _free_bytes() -> int:
    if not torch.cuda.is_available():
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
