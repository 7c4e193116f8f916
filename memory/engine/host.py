"""The host tier without a GPU: a real copy into a pool of host memory, the original let go.

Called emulation in logs: device and host are one memory here, so a process's size does not fall, but what is kept for
backward does, and every byte takes the way that it takes on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import torch

from memory.engine.handles import Ticket
from memory.engine.meter import LinkMeter


class HostTier(Protocol):
    meter: LinkMeter

    @property
    def pool_bytes(self) -> int:
        """Bytes of host memory taken from the system."""

    def offload(self, tensor: torch.Tensor) -> Ticket:
        """Copy a tensor out; the caller lets go of it."""

    def begin_plan(self) -> None:
        """What comes goes by another plan than what went before."""

    def leave_layer(self) -> None:
        """The forward pass has run a layer."""

    def begin_backward(self) -> None:
        """A forward pass is over."""


class HostPool:
    """Buffers by size, taken from the system once and used again for the whole run."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.pool_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        self.pool_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class EmulatedHostTier:
    """HostTier on the CPU: copies are synchronous."""

    def __init__(self) -> None:
        self._pool = HostPool()
        self.meter = LinkMeter(cuda=False)

    @property
    def pool_bytes(self) -> int:
        return self._pool.pool_bytes

    def offload(self, tensor: torch.Tensor) -> Ticket:
        return _EmulatedTicket(self._pool, self.meter, tensor)

    def begin_plan(self) -> None:
        pass

    def leave_layer(self) -> None:
        pass

    def begin_backward(self) -> None:
        pass


class _EmulatedTicket:
    def __init__(self, pool: HostPool, meter: LinkMeter, tensor: torch.Tensor) -> None:
        self._pool, self._meter = pool, meter
        self._like = torch.empty_like(tensor, device="meta")
        self._buffer = pool.take(tensor.numel() * tensor.element_size())
        with meter.span("out", self._buffer.numel()):
            self._host().copy_(tensor)
        self._device: torch.Tensor | None = None

    def _host(self) -> torch.Tensor:
        return self._buffer.view(self._like.dtype).as_strided(self._like.size(), self._like.stride())

    def prefetch(self) -> int:
        if self._device is not None:
            return 0
        self._device = torch.empty_strided(self._like.size(), self._like.stride(), dtype=self._like.dtype)
        with self._meter.span("back", self._buffer.numel()):
            self._device.copy_(self._host())
        return self._device.untyped_storage().nbytes()

    def fetch(self) -> torch.Tensor:
        self.prefetch()
        device, self._device = self._device, None
        assert device is not None
        return device

    def release(self) -> None:
        self._pool.give(self._buffer)
