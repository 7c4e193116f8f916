"""Page-locked host memory for the whole run, cut into buffers by size.

torch's own pinned allocator rounds every request up to a power of two; here a byte asked for is a byte taken. What the
plan needs is locked before the first step (cudaHostRegister), so that no step allocates or locks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

_ALIGN_BYTES = 512
#: locked at a time when a run needs more than its plan foresaw
_MORE_BYTES = 1 << 28
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
        """Lock so much now. Raises MemoryError beyond the limit."""
        if nbytes:
            self._spare.append(self._lock(nbytes))

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
                fitting = self._lock(max(size, _MORE_BYTES))
            else:
                self._spare = [block for block in self._spare if block is not fitting]
            self._tail = fitting
        memory, self._tail = self._tail[:size], self._tail[size:]
        return memory

    def _lock(self, nbytes: int) -> torch.Tensor:
        wanted_bytes = self.pool_bytes + nbytes
        if wanted_bytes > self._limit_bytes:
            raise MemoryError(
                f"{wanted_bytes / _GIB:.1f} GiB of page-locked host memory are needed, "
                f"{self._limit_bytes / _GIB:.1f} GiB are allowed on this rank"
            )
        # Filling touches the pages with all cores; the registration alone would do it with one.
        block = torch.empty(nbytes, dtype=torch.uint8).fill_(0)
        code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0)
        if int(code) != 0:
            raise MemoryError(f"cudaHostRegister of {nbytes} bytes failed ({code}); is the memlock limit too low?")
        self._blocks.append(block)
        return block
