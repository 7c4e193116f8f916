"""Counts the bytes held on the device for backward, by storage, and what one step kept, offloaded and recomputed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class StepBytes:
    """What one optimizer step (all its micro-batches) did with the tensors saved for backward, in bytes."""

    #: largest sum held on the device at one time, transients of recomputation and reloads included
    peak_saved_bytes: int
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int


class Ledger:
    """Running sums. Storages are counted once however many tensors or graphs hold them."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._holders: dict[int, int] = defaultdict(int)
        self.begin_step()

    def begin_step(self) -> None:
        self._peak_bytes = self.held_bytes
        self.kept_bytes = self.offloaded_bytes = self.recomputed_bytes = 0

    def end_step(self) -> StepBytes:
        return StepBytes(self._peak_bytes, self.kept_bytes, self.offloaded_bytes, self.recomputed_bytes)

    def grow(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def shrink(self, nbytes: int) -> None:
        self.held_bytes -= nbytes

    def hold(self, storage: int, nbytes: int) -> bool:
        """Count one more holder of a storage; True if it is the first."""
        self._holders[storage] += 1
        if self._holders[storage] > 1:
            return False
        self.grow(nbytes)
        return True

    def let_go(self, storage: int, nbytes: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self.shrink(nbytes)
