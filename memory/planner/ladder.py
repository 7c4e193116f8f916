"""Plans from cheap to thrifty, and where on that way down a run stands. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memory.plan import Plan
from memory.planner.pipeline import Pipeline, Prediction, frontier, predict


@dataclass(frozen=True)
class Rung:
    """A plan and what it is predicted to take; of rungs below one another only the differences matter."""

    plan: Plan
    peak_bytes: int
    step_s: float

    @staticmethod
    def of(prediction: Prediction) -> Rung:
        return Rung(prediction.plan, prediction.peak_bytes, prediction.step_s)


class Ladder:
    """The rungs of one run, the cheapest first. All ranks that make the same moves stand on the same rung."""

    def __init__(self, rungs: Iterable[Rung]) -> None:
        """Raises ValueError unless each rung takes less memory than the one before it."""
        self.rungs: Sequence[Rung] = tuple(rungs)
        peaks = [rung.peak_bytes for rung in self.rungs]
        if not peaks or any(below >= above for above, below in itertools.pairwise(peaks)):
            raise ValueError(f"rungs of a ladder go down in memory; these take {peaks} bytes")
        self.at = 0

    @property
    def current(self) -> Rung:
        return self.rungs[self.at]

    def down(self) -> Rung | None:
        """Memory ran out on this rung: the next one below; None where there is none."""
        if self.at + 1 == len(self.rungs):
            return None
        self.at += 1
        return self.current


def ladder_below(pipeline: Pipeline, plan: Plan, count: int) -> Ladder:
    """The plan and up to `count` thriftier ones, evenly spread down to the smallest peak that a plan is found for."""
    top = Rung.of(predict(pipeline, plan))
    below = [Rung.of(found) for found in frontier(pipeline, count + 1, at_most_bytes=top.peak_bytes)]
    return Ladder([top, *(rung for rung in below if rung.peak_bytes < top.peak_bytes)])
