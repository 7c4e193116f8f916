"""Output layer and vocab-parallel cross entropy in one, with one tensor of tokens x vocabulary in the weight's dtype.

Megatron's head keeps the softmax in fp32 and makes the logits' gradient beside it. Here the logits stay as the matrix
product left them, in bf16; softmax and gradient are made of them chunk by chunk in fp32, and the gradient takes the
logits' place. Row by row the arithmetic is Megatron's own, and the two products of backward are whole: the same bits
for a third of the bytes in bf16, and the softmax made twice.
"""

from __future__ import annotations

from typing import Any

import torch

from models.cross_entropy import all_tokens, first_row, grad_logits_, losses_by_chunk, reduced_over_ranks
from models.loss_head import chunk_length


def in_place_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, group: Any, sequence_parallel: bool
) -> torch.Tensor:
    """Loss of each token in fp32, [s, b]; differentiable once, in hidden and weight.

    hidden [s, b, h], of s / tensor-parallel ranks under sequence parallelism; weight [vocabulary / ranks, h]; labels
    [s, b]. group: the tensor-parallel ranks that the vocabulary is split over.

    A second backward (retain_graph) raises RuntimeError: the first one has used the logits up.
    """
    losses: torch.Tensor = _InPlaceCrossEntropy.apply(hidden, weight, labels, group, sequence_parallel)
    return losses


class _InPlaceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, group: Any, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel, ctx.spent = group, sequence_parallel, False
        logits = all_tokens(hidden, group, sequence_parallel) @ weight.t()
        # a copy also where the logits are fp32 already
        chunks = (piece.to(torch.float32, copy=True) for piece in logits.split(chunk_length(weight.size(0))))
        losses, maxima, sums = losses_by_chunk(chunks, labels, first_row(weight, group), group)
        ctx.save_for_backward(hidden, weight, labels, logits, maxima, sums)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("model.loss_head=in_place goes backward once; use model.loss_head=full for another time")
        ctx.spent = True
        hidden, weight, labels, gradient, maxima, sums = ctx.saved_tensors
        targets = labels.flatten() - first_row(weight, ctx.group)
        _grad_logits_(gradient, targets, maxima, sums, grad_losses.flatten())
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            product = (gradient @ weight).view(*labels.shape, -1)
            grad_hidden = reduced_over_ranks(product, ctx.group, ctx.sequence_parallel)
        if ctx.needs_input_grad[1]:
            grad_weight = gradient.t() @ all_tokens(hidden, ctx.group, ctx.sequence_parallel)
        return grad_hidden, grad_weight, None, None, None


def _grad_logits_(logits: torch.Tensor, *vectors: torch.Tensor) -> None:
    """The gradient in place of the logits [tokens, vocabulary / ranks] in their own dtype."""
    if logits.is_cuda:
        from models import triton_kernels

        triton_kernels.grad_logits_(logits, *vectors)
        return
    targets, *others = vectors
    columns = (targets, *(other[:, None] for other in others))
    pieces = (tensor.split(chunk_length(logits.size(1))) for tensor in (logits, *columns))
    for chunk, *rest in zip(*pieces, strict=True):
        chunk.copy_(grad_logits_(chunk.float(), *rest))
