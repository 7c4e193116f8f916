"""Times on the stream that is current, without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """On a GPU its marks are CUDA events, used again once given back; elsewhere seconds of a clock."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._free: list[Any] = []

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        make_event: Any = torch.cuda.Event
        event = self._free.pop() if self._free else make_event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks that the device has passed, which are given back."""
        if not self.cuda:
            return float(end - begin)
        self._free += (begin, end)
        return float(begin.elapsed_time(end)) / 1e3

    def give_back(self, marks: list[Any]) -> None:
        if self.cuda:
            self._free += marks
