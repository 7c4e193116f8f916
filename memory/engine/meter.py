"""How long copies over the link take, and how long compute waits for them, in the steps that are looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memory.engine.stopwatch import Stopwatch

Kind = Literal["out", "back", "stall"]

#: spans timed in one step, the first of it; later ones go untimed and uncounted
_MOST_SPANS = 8192


@dataclass(frozen=True)
class LinkUse:
    """The timed copies of one step. Seconds are sums over copies, from a copy's own begin: no queueing is in them."""

    out_bytes: int
    out_s: float
    back_bytes: int
    back_s: float
    #: compute stood still for copies; where they are synchronous, all of their time
    stall_s: float


class LinkMeter:
    """A stopwatch that, on a GPU, records events on the stream that is current and never waits."""

    def __init__(self, cuda: bool) -> None:
        self._watch = Stopwatch(cuda)
        self._on = False
        self._spans: list[tuple[Kind, int, Any, Any]] = []

    def begin_step(self, on: bool) -> None:
        self._on = on

    @contextlib.contextmanager
    def span(self, kind: Kind, nbytes: int = 0) -> Iterator[None]:
        if not self._on or len(self._spans) >= _MOST_SPANS:
            yield
            return
        begin = self._watch.mark()
        yield
        self._spans.append((kind, nbytes, begin, self._watch.mark()))

    def read(self) -> LinkUse:
        """Of the step that has ended; waits for the copies that nobody else has waited for."""
        seconds, total_bytes = dict.fromkeys(("out", "back", "stall"), 0.0), dict.fromkeys(("out", "back", "stall"), 0)
        for kind, nbytes, begin, end in self._spans:
            total_bytes[kind] += nbytes
            if self._watch.cuda:
                end.synchronize()
            seconds[kind] += self._watch.seconds(begin, end)
        self._spans.clear()
        if not self._watch.cuda:
            seconds["stall"] = seconds["out"] + seconds["back"]
        return LinkUse(total_bytes["out"], seconds["out"], total_bytes["back"], seconds["back"], seconds["stall"])
