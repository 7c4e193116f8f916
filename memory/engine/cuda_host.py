"""The host tier on a GPU: page-locked memory behind two copy streams, ordered against compute by events alone.

The CPU runs far ahead of the GPU, so whether a copy has finished is never asked for: a device copy is let go once the
compute stream has been made to wait for its way out, when a window's worth of bytes has set out after it. By then the
wait costs nothing as long as the link keeps up, and memory is freed at the same place in every step.
"""

from __future__ import annotations

from collections import deque

import torch

from memory.engine.handles import Ticket
from memory.engine.pinned import Buffer, PinnedPool


class CudaHostTier:
    """HostTier with one stream each way. Every call must come from the thread that runs the model (or its backward)."""

    def __init__(self, pool: PinnedPool, window_layers: float) -> None:
        """window_layers: how many layers' worth of bytes may be on their way out."""
        self._pool, self._window_layers = pool, window_layers
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
        #: tickets whose original still lies on the device, the oldest first
        self._leaving: deque[_CudaTicket] = deque()
        self._leaving_bytes = 0
        self._layer_bytes = self._largest_layer_bytes = 0

    @property
    def pool_bytes(self) -> int:
        return self._pool.pool_bytes

    def offload(self, tensor: torch.Tensor) -> Ticket:
        nbytes = tensor.numel() * tensor.element_size()
        buffer = self._pool.take(nbytes)
        ticket = _CudaTicket(self, tensor, buffer)
        self._out.wait_stream(torch.cuda.current_stream())
        if buffer.last_read is not None:
            self._out.wait_event(buffer.last_read)
        with torch.cuda.stream(self._out):
            self.copy(ticket.host(), tensor)
        ticket.left.record(self._out)
        self._leaving.append(ticket)
        self._leaving_bytes += nbytes
        self._layer_bytes += nbytes
        self._largest_layer_bytes = max(self._largest_layer_bytes, self._layer_bytes)
        self._let_go()
        return ticket

    def enter_layer(self) -> None:
        self._layer_bytes = 0

    def _let_go(self) -> None:
        window_bytes = self._window_layers * self._largest_layer_bytes
        while self._leaving_bytes > window_bytes:
            ticket = self._leaving.popleft()
            self._leaving_bytes -= ticket.nbytes
            ticket.let_go()

    def start_back(self, ticket: _CudaTicket) -> torch.Tensor:
        device = ticket.empty()
        # The memory may have been another tensor's until just now on the compute stream.
        self._back.wait_stream(torch.cuda.current_stream())
        self._back.wait_event(ticket.left)
        with torch.cuda.stream(self._back):
            self.copy(device, ticket.host())
        ticket.back.record(self._back)
        ticket.buffer.last_read = ticket.back
        return device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream."""
        target.copy_(source, non_blocking=True)

    def release(self, buffer: Buffer) -> None:
        self._pool.give(buffer)


class _CudaTicket:
    def __init__(self, tier: CudaHostTier, tensor: torch.Tensor, buffer: Buffer) -> None:
        self._tier, self.buffer = tier, buffer
        self._like = torch.empty_like(tensor, device="meta")
        #: on the device: the original until it is let go of, then what has come back
        self._device: torch.Tensor | None = tensor
        self._is_original = True
        self.left, self.back = torch.cuda.Event(), torch.cuda.Event()

    @property
    def nbytes(self) -> int:
        return self._like.numel() * self._like.element_size()

    def host(self) -> torch.Tensor:
        return (
            self.buffer.memory[: self.nbytes].view(self._like.dtype).as_strided(self._like.size(), self._like.stride())
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self._like.size(), self._like.stride(), dtype=self._like.dtype, device="cuda")

    def let_go(self) -> None:
        if self._is_original and self._device is not None:
            torch.cuda.current_stream().wait_event(self.left)
            self._device = None
        self._is_original = False

    def prefetch(self) -> int:
        if self._device is not None:
            return 0
        self._device = self._tier.start_back(self)
        return self._device.untyped_storage().nbytes()

    def fetch(self) -> torch.Tensor:
        self.prefetch()
        device, self._device = self._device, None
        assert device is not None
        if not self._is_original:
            torch.cuda.current_stream().wait_event(self.back)
        return device

    def release(self) -> None:
        if self._device is not None:
            # Dropped without being read: whoever gets this memory next must not meet a copy on its way.
            torch.cuda.current_stream().wait_event(self.left if self._is_original else self.back)
            self._device = None
        self._tier.release(self.buffer)
