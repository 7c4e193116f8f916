"""Micro-batches by position: which samples a rank reads at a step depends on the samples consumed before it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer.config.errors import ConfigError
from trainer.run.data.samples import Sample, SampleSource


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device; every tensor is [micro_batch, seq_length / context parallel size]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    #: float32; 0 where the loss does not count
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is cut, and which cut is this rank's."""

    micro_batch: int
    #: micro-batches per step on each data-parallel rank
    micro_batches: int
    data_rank: int
    data_size: int
    context_rank: int = 0
    context_size: int = 1
    #: the schedule runs micro-batches in multiples of this
    multiple: int = 1

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch * self.micro_batches * self.data_size


class Batches:
    """Reads micro-batches of training and held-out samples for this rank.

    Raises:
        ConfigError: data.split leaves no held-out sample although `eval_batches` asks for some.
    """

    def __init__(
        self, source: SampleSource, shape: BatchShape, vocab_size: int, eval_batches: int, device: torch.device
    ):
        self.shape = shape
        self._source = source
        self._vocab_size = vocab_size
        self._device = device
        self._blocks: dict[int, Sequence[Sample]] = {}
        self._held_out: Sequence[Sample] = source.held_out() if eval_batches else ()
        whole = len(self._held_out) // (shape.micro_batch * shape.data_size)
        #: micro-batches per rank of one evaluation: fewer than asked for where the held-out part is smaller
        self.eval_batches = max(min(eval_batches, whole) // shape.multiple, 1) * shape.multiple

    def train(self, consumed: int) -> Iterator[Batch]:
        """This rank's micro-batches of the step that follows `consumed` samples.

        Collective: a step that enters a new block builds its index.
        """
        length = self._source.block_length
        needed = range(consumed // length, (consumed + self.shape.global_batch - 1) // length + 1)
        self._blocks = {number: self._blocks.get(number) or self._source.block(number) for number in needed}
        return self._read(consumed, self.shape.micro_batches, self._train_sample)

    def held_out(self) -> Iterator[Batch]:
        """This rank's micro-batches of an evaluation, the same ones each time."""
        return self._read(0, self.eval_batches, lambda index: self._held_out[index % len(self._held_out)])

    def _train_sample(self, index: int) -> Sample:
        block, offset = divmod(index, self._source.block_length)
        return self._blocks[block][offset]

    def _read(self, first: int, count: int, sample: Callable[[int], Sample]) -> Iterator[Batch]:
        shape = self.shape
        for micro_batch in range(count):
            begin = first + (micro_batch * shape.data_size + shape.data_rank) * shape.micro_batch
            yield self._to_device([sample(index) for index in range(begin, begin + shape.micro_batch)])

    def _to_device(self, samples: Sequence[Sample]) -> Batch:
        tokens, labels, loss_mask = (
            torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "loss_mask")
        )
        for ids in (tokens, labels):
            # checked here, on the CPU: beyond the embedding table a GPU would only report an illegal access
            if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
                worst = int(ids.max()) if int(ids.max()) >= self._vocab_size else int(ids.min())
                raise ConfigError(
                    "data.path",
                    f"it holds token id {worst}, outside the vocabulary of {self._vocab_size}",
                    "Give the tokenizer that the files were made with, or a larger data.vocab_size",
                )
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return Batch(*(self._place(tensor) for tensor in (tokens, labels, loss_mask, positions)))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = context_share(tensor, self.shape.context_rank, self.shape.context_size)
        if self._device.type == "cuda":
            return tensor.contiguous().pin_memory().to(self._device, non_blocking=True)
        return tensor


def context_share(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A context-parallel rank's part of [batch, seq]: of 2 x size equal chunks the rank-th from each end, which gives
    all ranks the same causal attention work (Megatron: get_batch_on_this_cp_rank)."""
    if size == 1:
        return tensor
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)
