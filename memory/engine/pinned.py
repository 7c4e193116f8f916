"""Page-locked host memory for the whole run, cut into buffers by size.

torch's own pinned allocator rounds every request up to a power of two; here a byte asked for is a byte taken. Blocks are
locked by cudaHostRegister when first needed and never given back, so that a steady step neither allocates nor locks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

_ALIGN_BYTES = 512
_BLOCK_BYTES = 1 << 30
_GIB = 1 << 30


@dataclass(eq=False)
class Buffer:
    """A part of a block. A new write must wait for the last read: it may still be on its way to the device."""

    memory: torch.Tensor
    last_read: torch.cuda.Event | None = None


class PinnedPool:
    """Buffers of page-locked memory, at most limit_bytes in all."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: list[torch.Tensor] = []
        #: blocks not yet cut, and what is left of the one being cut
        self._spare: list[torch.Tensor] = []
        self._tail = torch.empty(0, dtype=torch.uint8)
        self._free: dict[int, list[Buffer]] = defaultdict(list)
        self._in_use = 0

    @property
    def pool_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def reserve(self, nbytes: int) -> None:
        """Lock memory for so many bytes now, rather than in the first step."""
        while nbytes > 0:
            self._spare.append(self._lock(min(nbytes, _BLOCK_BYTES)))
            nbytes -= _BLOCK_BYTES

    def take(self, nbytes: int) -> Buffer:
        size = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        buffer = self._free[size].pop() if self._free[size] else Buffer(self._cut(size))
        self._in_use += 1
        return buffer

    def give(self, buffer: Buffer) -> None:
        self._in_use -= 1
        self._free[buffer.memory.numel()].append(buffer)

    def close(self) -> None:
        """Unlock everything; copies under way are waited for."""
        if self._blocks:
            torch.cuda.synchronize()
        while self._blocks:
            torch.cuda.cudart().cudaHostUnregister(self._blocks.pop().data_ptr())
        self._free.clear()

    def __del__(self) -> None:
        self.close()

    def _cut(self, size: int) -> torch.Tensor:
        if self._in_use == 0 and self._free:
            # Shapes have changed since the blocks were cut: cut them anew instead of locking more.
            torch.cuda.synchronize()
            self._free.clear()
            self._spare, self._tail = list(self._blocks), self._tail[:0]
        if self._tail.numel() < size:
            fitting = next((block for block in self._spare if block.numel() >= size), None)
            if fitting is None:
                fitting = self._lock(max(size, _BLOCK_BYTES))
            else:
                self._spare = [block for block in self._spare if block is not fitting]
            self._tail = fitting
        memory, self._tail = self._tail[:size], self._tail[size:]
        return memory

    def _lock(self, nbytes: int) -> torch.Tensor:
        if self.pool_bytes + nbytes > self._limit_bytes:
            raise RuntimeError(
                f"offload: {(self.pool_bytes + nbytes) / _GIB:.1f} GiB of page-locked host memory needed, the limit on "
                f"this rank is {self._limit_bytes / _GIB:.1f} GiB; offload less (offload.fraction, offload.modules, "
                "offload.num_layers) or raise offload.host_limit_gib"
            )
        block = torch.zeros(nbytes, dtype=torch.uint8)
        code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(
                f"offload: cudaHostRegister of {nbytes} bytes failed: {code}; is the memlock limit too low?"
            )
        self._blocks.append(block)
        return block
