"""The host tier on a GPU: page-locked memory behind two copy streams, ordered against compute by events alone.

The CPU runs far ahead of the GPU, so whether a copy has finished is never asked for: a device copy is let go when the
compute stream has been made to wait for it, `window` layers after the layer it came from. By then the wait costs nothing
as long as the link keeps up, and memory is freed at the same place in every step.
"""

from __future__ import annotations

from collections import deque

import torch

from memory.engine.handles import Ticket
from memory.engine.pinned import Buffer, PinnedPool


class CudaHostTier:
    """HostTier with one stream each way. Every call must come from the thread that runs the model (or its backward)."""

    def __init__(self, pool: PinnedPool, window: int) -> None:
        self._pool, self._window = pool, window
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()
        self._layer = 0
        #: copies whose original still lies on the device, with the layer they came from
        self._leaving: deque[tuple[int, _CudaTicket]] = deque()

    @property
    def pool_bytes(self) -> int:
        return self._pool.pool_bytes

    def offload(self, tensor: torch.Tensor) -> Ticket:
        buffer = self._pool.take(tensor.numel() * tensor.element_size())
        ticket = _CudaTicket(self, tensor, buffer)
        self._out.wait_stream(torch.cuda.current_stream())
        if buffer.last_read is not None:
            self._out.wait_event(buffer.last_read)
        with torch.cuda.stream(self._out):
            self.copy(ticket.host(), tensor)
        ticket.left.record(self._out)
        self._leaving.append((self._layer, ticket))
        return ticket

    def enter_layer(self) -> None:
        self._layer += 1
        self._let_go(self._layer - self._window)

    def settle(self) -> None:
        """Let go of every device copy whose way out has been started."""
        self._let_go(self._layer + 1)

    def _let_go(self, before_layer: int) -> None:
        while self._leaving and self._leaving[0][0] < before_layer:
            _, ticket = self._leaving.popleft()
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

    def host(self) -> torch.Tensor:
        nbytes = self._like.numel() * self._like.element_size()
        return self.buffer.memory[:nbytes].view(self._like.dtype).as_strided(self._like.size(), self._like.stride())

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
