"""What a plan has to fit into: one pipeline stage on one rank, and the order in which it runs micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memory.planner.costs import LayerCost


@dataclass(frozen=True)
class Head:
    """The output layer and the loss, on the last stage alone."""

    #: from its forward to its backward; the last layer's output included
    kept_bytes: int = 0
    #: beside that in either of them
    transient_bytes: int = 0
    gradient_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Sizes and seconds of one rank of a pipeline stage. Bytes are of the device, per rank."""

    cost: LayerCost
    #: numbers over the whole model, by model chunk, in forward order
    chunks: tuple[tuple[int, ...], ...]
    #: of the pipeline
    rank: int
    size: int
    #: in a step
    micro_batches: int
    weight_bytes: int
    #: allocated before the first step; 0 where gradients come into being during backward
    gradient_bytes: int
    optimizer_bytes: int
    #: workspaces of the libraries
    workspace_bytes: int
    link_bytes_per_s: float
    #: gradients come into being during backward and are dropped after it
    gradients_grow: bool
    head: Head = Head()
    #: of the input embedding, on the first stage
    embedding_gradient_bytes: int = 0
    #: layers' worth of bytes that may be on their way out before compute waits; 0: copies are synchronous
    window_layers: float = 1.0
    #: page-locked memory of this rank; None: not limited
    host_limit_bytes: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(number for chunk in self.chunks for number in chunk)

    @property
    def in_flight(self) -> int:
        """The most passes of one chunk, on average over the chunks, that wait for their backward at one time."""
        passes, most = 0, 0
        for forward, _, _ in schedule(self.rank, self.size, len(self.chunks), self.simulated_micro_batches):
            passes += 1 if forward else -1
            most = max(most, passes)
        return -(-most // len(self.chunks))

    @property
    def simulated_micro_batches(self) -> int:
        """Enough for the pipeline to fill and to show its steady state; the others repeat it."""
        if self.size == 1:
            return min(self.micro_batches, 2)
        enough = self.size * (2 if len(self.chunks) > 1 else 1)
        return min(self.micro_batches, enough)


def schedule(rank: int, size: int, chunks: int, micro_batches: int) -> Iterator[tuple[bool, int, int]]:
    """(forward?, chunk, micro-batch) in the order of Megatron's schedules on this stage.

    Source: megatron.core.pipeline_parallel.schedules: 1F1B, and its interleaved form where there are several chunks.
    """
    total = micro_batches * chunks
    if chunks == 1:
        warm_up = min(size - rank - 1, total)
    else:
        warm_up = min((size - rank - 1) * 2 + (chunks - 1) * size, total)
    for number in range(warm_up):
        yield _virtual(True, number, size, chunks)
    for number in range(warm_up, total):
        yield _virtual(True, number, size, chunks)
        yield _virtual(False, number - warm_up, size, chunks)
    for number in range(total - warm_up, total):
        yield _virtual(False, number, size, chunks)


def _virtual(forward: bool, number: int, size: int, chunks: int) -> tuple[bool, int, int]:
    """The chunk and the micro-batch of the number-th pass in one direction: `size` micro-batches a chunk in turn."""
    if chunks == 1:
        return forward, 0, number
    round_number, place = divmod(number, size * chunks)
    chunk = place // size
    return forward, chunk if forward else chunks - 1 - chunk, round_number * size + place % size
