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

from models.cross_entropy import all_tokens, first_row, grad_logits_, losses_by_chunk, reduced_over_ranks
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
        inputs = all_tokens(hidden, group, sequence_parallel)
        pieces = inputs.split(chunk_length(weight.size(0)))
        chunks = ((piece @ weight.t()).float() for piece in pieces)
        losses, maxima, sums = losses_by_chunk(chunks, labels, first_row(weight, group), group)
        ctx.save_for_backward(hidden, weight, labels, maxima, sums)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, maxima, sums = ctx.saved_tensors
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        inputs = all_tokens(hidden, ctx.group, ctx.sequence_parallel)
        targets = labels.flatten() - first_row(weight, ctx.group)
        scale = grad_losses.reshape(-1, 1)
        grad_weight = torch.empty_like(weight) if wants_weight else None
        total: torch.Tensor | None = None
        length = chunk_length(inputs.size(0))
        for first in range(0, weight.size(0), length):
            rows = weight[first : first + length]
            logits = (inputs @ rows.t()).float()
            gradient = grad_logits_(logits, targets - first, maxima[:, None], sums[:, None], scale).to(rows.dtype)
            del logits
            if grad_weight is not None:
                torch.matmul(gradient.t(), inputs, out=grad_weight[first : first + length])
            if wants_input:
                total = (gradient @ rows).float() if total is None else total.add_(gradient @ rows)
            del gradient  # before the next one is made
        grad_hidden = None
        if total is not None:
            total = total.to(hidden.dtype).view(*labels.shape, -1)
            grad_hidden = reduced_over_ranks(total, ctx.group, ctx.sequence_parallel)
        return grad_hidden, grad_weight, None, None, None
