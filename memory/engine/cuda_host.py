"""The host tier on a GPU: page-locked memory behind two copy streams, ordered against compute by events alone.

The CPU runs far ahead of the GPU, so whether a copy has finished is never asked for: an original is let go once the
compute stream has been made to wait for its way out. In the first forward pass that is as soon as it is late, when a
window's worth of bytes or of layers has gone by since. The most that was held in that pass is a mark; in later ones
late originals go only where more than that would be held. So early layers may send faster than the link carries, which
then works all through forward; the peak stays the first pass's, and memory is freed at the same place in every step.
"""

from __future__ import annotations

from collections import deque

import torch

from memory.engine.handles import Ticket
from memory.engine.ledger import Ledger
from memory.engine.meter import LinkMeter
from memory.engine.pinned import Buffer, PinnedPool


class CudaHostTier:
    """HostTier with one stream each way. Every call must come from the thread that runs the model (or its backward)."""

    def __init__(self, pool: PinnedPool, ledger: Ledger, window_layers: float) -> None:
        """window_layers: how many layers, or layers' worth of bytes, a way out may take before compute waits."""
        self._pool, self.ledger, self._window_layers = pool, ledger, window_layers
        self.meter = LinkMeter(cuda=True)
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
        #: the oldest first; those whose original is gone by another way are passed over
        self._leaving: deque[_CudaTicket] = deque()
        self.leaving_bytes = 0
        self._layers_run = 0
        self.begin_plan()

    @property
    def pool_bytes(self) -> int:
        return self._pool.pool_bytes

    def begin_plan(self) -> None:
        self._layer_bytes = self._largest_layer_bytes = 0
        #: most bytes held after letting late originals go
        self._mark_bytes = 0
        self._marking = True

    def offload(self, tensor: torch.Tensor) -> Ticket:
        nbytes = tensor.numel() * tensor.element_size()
        buffer = self._pool.take(nbytes)
        ticket = _CudaTicket(self, tensor, buffer, self._layers_run)
        self._out.wait_stream(torch.cuda.current_stream())
        if buffer.last_read is not None:
            self._out.wait_event(buffer.last_read)
        with torch.cuda.stream(self._out), self.meter.span("out", nbytes):
            self.copy(ticket.host(), tensor)
        ticket.left.record(self._out)
        self._leaving.append(ticket)
        self._layer_bytes += nbytes
        self._largest_layer_bytes = max(self._largest_layer_bytes, self._layer_bytes)
        self._let_go()
        return ticket

    def leave_layer(self) -> None:
        self._layers_run += 1
        self._layer_bytes = 0
        self._let_go()

    def begin_backward(self) -> None:
        self._marking = False

    def _let_go(self) -> None:
        window_bytes = self._window_layers * self._largest_layer_bytes
        while self._leaving:
            oldest = self._leaving[0]
            late = self.leaving_bytes > window_bytes or self._layers_run - oldest.layer > self._window_layers
            over = self._marking or self.ledger.held_bytes > self._mark_bytes
            if oldest.on_its_way and not (late and over):
                break
            self._leaving.popleft().let_go()
        self._mark_bytes = max(self._mark_bytes, self.ledger.held_bytes)

    def start_back(self, ticket: _CudaTicket) -> torch.Tensor:
        device = ticket.empty()
        # The memory may have been another tensor's until just now on the compute stream.
        self._back.wait_stream(torch.cuda.current_stream())
        self._back.wait_event(ticket.left)
        with torch.cuda.stream(self._back), self.meter.span("back", ticket.nbytes):
            self.copy(device, ticket.host())
        ticket.back.record(self._back)
        ticket.buffer.last_read = ticket.back
        return device

    def wait(self, event: torch.cuda.Event) -> None:
        """Let compute stand still until then."""
        with self.meter.span("stall"):
            torch.cuda.current_stream().wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream."""
        target.copy_(source, non_blocking=True)

    def release(self, buffer: Buffer) -> None:
        self._pool.give(buffer)


class _CudaTicket:
    def __init__(self, tier: CudaHostTier, tensor: torch.Tensor, buffer: Buffer, layer: int) -> None:
        """layer: how many had run when the tensor set out."""
        self._tier, self.buffer, self.layer = tier, buffer, layer
        self._like = torch.empty_like(tensor, device="meta")
        self._original: torch.Tensor | None = tensor
        self._returned: torch.Tensor | None = None
        storage = tensor.untyped_storage()
        self._storage, self._storage_bytes = storage._cdata, storage.nbytes()
        tier.ledger.hold(self._storage, self._storage_bytes)
        tier.leaving_bytes += self.nbytes
        self.left, self.back = torch.cuda.Event(), torch.cuda.Event()

    @property
    def nbytes(self) -> int:
        return self._like.numel() * self._like.element_size()

    @property
    def on_its_way(self) -> bool:
        """The original is still held for the copy out."""
        return self._original is not None

    def host(self) -> torch.Tensor:
        return (
            self.buffer.memory[: self.nbytes].view(self._like.dtype).as_strided(self._like.size(), self._like.stride())
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self._like.size(), self._like.stride(), dtype=self._like.dtype, device="cuda")

    def let_go(self) -> None:
        """Drop the original as soon as it is out."""
        if self._original is not None:
            self._tier.wait(self.left)
            self._take_original()

    def _take_original(self) -> torch.Tensor:
        original, self._original = self._original, None
        assert original is not None
        self._tier.leaving_bytes -= self.nbytes
        self._tier.ledger.let_go(self._storage, self._storage_bytes)
        return original

    def prefetch(self) -> int:
        if self._original is not None or self._returned is not None:
            return 0
        self._returned = self._tier.start_back(self)
        return self._returned.untyped_storage().nbytes()

    def fetch(self) -> torch.Tensor:
        if self._original is not None:
            return self._take_original()
        self.prefetch()
        returned, self._returned = self._returned, None
        assert returned is not None
        self._tier.wait(self.back)
        return returned

    def release(self) -> None:
        self.let_go()
        if self._returned is not None:
            # Dropped without being read: whoever gets this memory next must not meet a copy on its way.
            torch.cuda.current_stream().wait_event(self.back)
            self._returned = None
        self._tier.release(self.buffer)
