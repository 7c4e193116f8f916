from __future__ import annotations

from itertools import pairwise

import pytest

from memory.plan import keep_plan
from memory.planner.ladder import Ladder, Rung, ladder_below
from memory.planner.pipeline import Pipeline, decide
from tests.memory.planner.h200 import GIB, setting_a


def _ladder() -> Ladder:
    return Ladder(Rung(keep_plan(1), peak, 1.0) for peak in (30, 20, 10))


def test_down_to_the_last_rung_and_no_further() -> None:
    ladder = _ladder()
    steps = [ladder.down() for _ in range(3)]
    assert [rung.peak_bytes if rung else None for rung in steps] == [20, 10, None]
    assert ladder.current.peak_bytes == 10


def test_rungs_go_down_in_memory() -> None:
    with pytest.raises(ValueError, match="go down in memory"):
        Ladder([Rung(keep_plan(1), 1, 1.0), Rung(keep_plan(1), 1, 2.0)])


def test_below_a_plan_are_thriftier_ones() -> None:
    pipeline = Pipeline((setting_a(),), 8)
    plan = decide(pipeline, 16 * GIB).prediction.plan
    ladder = ladder_below(pipeline, plan, 4)
    assert ladder.current.plan == plan and len(ladder.rungs) > 2
    for above, below in pairwise(ladder.rungs):
        assert below.peak_bytes < above.peak_bytes and below.step_s > above.step_s
