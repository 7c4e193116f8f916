"""The pieces that the loss heads share: Megatron's vocab-parallel cross entropy on some of the logits at a time.

The operations, and so the bits, are those of Megatron's VocabParallelCrossEntropy.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def all_tokens(hidden: torch.Tensor, group: Any, sequence_parallel: bool) -> torch.Tensor:
    """The head's whole input, [tokens, h], of hidden [s, b, h], which sequence parallelism has split."""
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    return hidden.flatten(0, 1)


def reduced_over_ranks(grad_hidden: torch.Tensor, group: Any, sequence_parallel: bool) -> torch.Tensor:
    """Gradient of the head's input as this rank holds it, from this rank's part of the vocabulary's, [s, b, h]."""
    reduce = (
        reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
    )
    reduced: torch.Tensor = reduce(grad_hidden, group=group)
    return reduced


def first_row(weight: torch.Tensor, group: Any) -> int:
    """Which of the vocabulary this rank's weight begins with."""
    first, _ = VocabUtility.vocab_range_from_per_partition_vocab_size(
        weight.size(0), get_pg_rank(group), get_pg_size(group)
    )
    return int(first)


def _statistics_(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: its largest logit over all ranks, this rank's sum of exponentials, and the target's logit less the
    largest, where it is this rank's.

    logits [tokens, vocabulary / ranks] in fp32 are overwritten; first is the first of them in the whole vocabulary.
    """
    logits, maxima = VocabParallelCrossEntropy.calculate_logits_max(logits)
    all_reduce(maxima, ReduceOp.MAX, group=group)
    _, _, predicted, sums, _ = VocabParallelCrossEntropy.calculate_predicted_logits(
        logits, targets, maxima, first, first + logits.size(1)
    )
    return maxima, sums, predicted


def losses_by_chunk(
    chunks: Iterable[torch.Tensor], labels: torch.Tensor, first: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of each token, [s, b], and what its backward needs: largest logit and sum of exponentials, [tokens].

    chunks: the logits of these labels [s, b] a few tokens at a time, in fp32, to be overwritten.
    """
    targets = labels.flatten()
    found, begun = [], 0
    for logits in chunks:
        found.append(_statistics_(logits, targets[begun : begun + logits.size(0)], first, group))
        begun += logits.size(0)
        del logits  # before the next one is made
    maxima, sums, predicted = map(torch.cat, zip(*found, strict=True))
    all_reduce(sums, group=group)
    all_reduce(predicted, group=group)
    return (torch.log(sums) - predicted).view_as(labels), maxima, sums


def grad_logits_(
    logits: torch.Tensor, targets: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The gradient in place of the logits [tokens, rows] in fp32: softmax less one-hot target, scaled.

    targets [tokens] are counted from the first of these logits; maxima, sums and scale are [tokens, 1].
    """
    gradient = logits.sub_(maxima).exp_().div_(sums)
    here = (targets >= 0) & (targets < logits.size(1))
    token = torch.arange(targets.size(0), device=targets.device)
    gradient[token, targets.masked_fill(~here, 0)] -= here.to(gradient.dtype)
    return gradient.mul_(scale)
