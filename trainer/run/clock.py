"""Forward, backward and optimizer time of a step, taken where Megatron itself takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memory.engine.stopwatch import Stopwatch

FORWARD = "forward-compute"
BACKWARD = "backward-compute"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class StepTimes:
    """Seconds on this rank, summed over the step's micro-batches."""

    forward_s: float
    backward_s: float
    optimizer_s: float


class _Span:
    """One named timer in the shape of megatron.core.timers.Timer, of which the schedules call start and stop."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.marks: list[Any] = []

    def start(self, barrier: bool = False) -> None:
        self.marks.append(self._mark())

    def stop(self, barrier: bool = False) -> None:
        self.marks.append(self._mark())


class _Ignored:
    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


_IGNORED = _Ignored()


class StepClock:
    """Stands in for Megatron's timers (TransformerConfig.timers).

    On a GPU it records CUDA events and never waits: Megatron's own Timer synchronises the device at every start and
    stop, which takes the overlap away that one wants to measure. `read` needs a device that has caught up.
    """

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device.type == "cuda")
        self._spans = {name: _Span(self._watch.mark) for name in (FORWARD, BACKWARD, OPTIMIZER)}

    def __call__(self, name: str, log_level: int | None = None) -> _Span | _Ignored:
        return self._spans.get(name, _IGNORED)

    def read(self) -> StepTimes:
        """Times since the last call. On a GPU call it after the step's synchronisation."""
        return StepTimes(*(self._take(self._spans[name]) for name in (FORWARD, BACKWARD, OPTIMIZER)))

    def drop(self) -> None:
        """Forget what was recorded since the last read, as of a step that came to no end."""
        for span in self._spans.values():
            self._watch.give_back(span.marks)
            span.marks.clear()

    def _take(self, span: _Span) -> float:
        pairs = list(zip(span.marks[::2], span.marks[1::2], strict=True))
        span.marks.clear()
        return sum(self._watch.seconds(begin, end) for begin, end in pairs)
