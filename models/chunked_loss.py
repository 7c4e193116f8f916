"""Output layer and vocab-parallel cross entropy in one, without ever a tensor of tokens x vocabulary.

Forward goes over chunks of tokens, with Megatron's own arithmetic. Backward makes the logits again and goes over chunks
of the vocabulary instead: the gradient of each part of the output weight is then one product over all tokens, final
when computed, where chunks of tokens would need an fp32 sum as large as the weight (2 GiB for Llama-3-8B) and read and
write it for every chunk. What is summed up is the input's gradient, which is smaller unless tokens outnumber the
vocabulary. It needs no communication but that of the input's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.utils import get_pg_rank, get_pg_size
from torch.distributed import ReduceOp, all_reduce

from models.loss_head import chunk_length


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, group: Any, sequence_parallel: bool
) -> torch.Tensor:
    """Loss of each token in fp32, [s, b]; differentiable once in hidden and weight.

    hidden [s, b, h], of s / tensor-parallel ranks under sequence parallelism; weight [vocabulary / ranks, h]; labels
    [s, b]. group: the tensor-parallel ranks that the vocabulary is split over.
    """
    losses: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, group, sequence_parallel)
    return losses


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, group: Any, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        inputs = _all_tokens(hidden, group, sequence_parallel)
        length = chunk_length(weight.size(0))
        first = _first_row(weight, group)
        chunks = zip(inputs.split(length), labels.flatten().split(length), strict=True)
        statistics = [_statistics(chunk, weight, targets, first, group) for chunk, targets in chunks]
        maxima, sums, predicted = map(torch.cat, zip(*statistics, strict=True))
        all_reduce(sums, group=group)
        all_reduce(predicted, group=group)
        ctx.save_for_backward(hidden, weight, labels, maxima, sums)
        return (torch.log(sums) - predicted).view_as(labels)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, maxima, sums = ctx.saved_tensors
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        inputs = _all_tokens(hidden, ctx.group, ctx.sequence_parallel)
        targets = labels.flatten() - _first_row(weight, ctx.group)
        scale = grad_losses.reshape(-1, 1)
        grad_weight = torch.empty_like(weight) if wants_weight else None
        total: torch.Tensor | None = None
        length = chunk_length(inputs.size(0))
        for first in range(0, weight.size(0), length):
            rows = weight[first : first + length]
            grad_logits = _grad_logits(inputs, rows, targets - first, maxima[:, None], sums[:, None], scale)
            if grad_weight is not None:
                torch.matmul(grad_logits.t(), inputs, out=grad_weight[first : first + length])
            if wants_input:
                total = (grad_logits @ rows).float() if total is None else total.add_(grad_logits @ rows)
            del grad_logits  # before the next one is made
        grad_hidden = None
        if total is not None:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if ctx.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            grad_hidden = reduce(total.to(hidden.dtype).view(*labels.shape, -1), group=ctx.group)
        return grad_hidden, grad_weight, None, None, None


def _all_tokens(hidden: torch.Tensor, group: Any, sequence_parallel: bool) -> torch.Tensor:
    """The head's whole input, [tokens, h]."""
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    return hidden.flatten(0, 1)


def _first_row(weight: torch.Tensor, group: Any) -> int:
    """Which of the vocabulary this rank's weight begins with."""
    first, _ = VocabUtility.vocab_range_from_per_partition_vocab_size(
        weight.size(0), get_pg_rank(group), get_pg_size(group)
    )
    return int(first)


def _statistics(
    inputs: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, first: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: its largest logit over all ranks, this rank's sum of exponentials, and the target's logit if it
    is this rank's."""
    logits, maxima = VocabParallelCrossEntropy.calculate_logits_max(inputs @ weight.t())
    all_reduce(maxima, ReduceOp.MAX, group=group)
    _, _, predicted, sums, _ = VocabParallelCrossEntropy.calculate_predicted_logits(
        logits, targets, maxima, first, first + weight.size(0)
    )
    return maxima, sums, predicted


def _grad_logits(
    inputs: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits of these rows of the weight, [tokens, rows]: softmax less one-hot target, scaled.

    targets are counted from the first of these rows. The operations, and so the bits, are those of Megatron's
    VocabParallelCrossEntropy.
    """
    gradient = (inputs @ rows.t()).float().sub_(maxima).exp_().div_(sums)
    here = (targets >= 0) & (targets < rows.size(0))
    token = torch.arange(targets.size(0), device=targets.device)
    gradient[token, targets.masked_fill(~here, 0)] -= here.to(gradient.dtype)
    return gradient.mul_(scale).to(rows.dtype)
