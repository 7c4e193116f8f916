"""What the solver finds against all that there is to find, on cases small enough to try everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product

import pytest

from memory.plan import keep_plan
from memory.planner.counts import Counting, count_layers
from memory.planner.pipeline import Pipeline, decide, frontier, smallest_peak_bytes, thriftiest
from memory.planner.profiles import pareto, plan_of, profiles
from memory.planner.simulate import simulate
from memory.planner.solve import Infeasible, solve
from tests.memory.planner.h200 import GIB, setting_a, setting_b, stage


def _few(options: int) -> tuple:  # type: ignore[type-arg]
    """So many profiles over the whole range."""
    found = profiles(setting_a().cost)
    return tuple(found[index * (len(found) - 1) // (options - 1)] for index in range(options))


@pytest.mark.parametrize("room_gib", [4, 6, 8, 10])
def test_counts_are_the_best_of_all(room_gib: float) -> None:
    task = Counting(
        options=profiles(setting_a().cost),
        layers=4,
        in_flight=2,
        room_bytes=room_gib * GIB,
        reload_bytes=0.7 * GIB,
        window_layers=1.0,
        link_bytes_per_s=55e9,
        forward_s=0.05,
        backward_s=0.1,
    )
    best = min(
        (
            seconds
            for chosen in combinations_with_replacement(task.options, 4)
            if (seconds := _seconds(task, chosen)) is not None
        ),
        default=None,
    )
    found = count_layers(task)
    assert found is not None and best is not None
    assert sum(found.of.values()) == 4
    assert found.added_s == pytest.approx(best, rel=4e-3)


def _seconds(task: Counting, chosen: tuple) -> float | None:  # type: ignore[type-arg]
    """Added seconds of four layers by the definition of the limits; None where one is not kept to."""
    window = max(profile.offloaded_bytes for profile in chosen)
    away = sum(profile.offloaded_bytes for profile in chosen)
    added = sum(profile.added_s for profile in chosen)
    if task.in_flight * sum(p.kept_bytes for p in chosen) > task.room_bytes or 0.6 * window > task.reload_bytes:
        return None
    out_s = max(0.0, away / task.link_bytes_per_s - task.forward_s)
    back_s = max(0.0, away / task.link_bytes_per_s - added - task.backward_s)
    return added + out_s + back_s


@pytest.mark.parametrize("share", [0.15, 0.4, 0.7, 0.9])
def test_plans_are_within_a_hundredth_of_the_best_of_all(share: float) -> None:
    small = stage(4, 4096, 4)
    options = profiles(small.cost)
    keep = simulate(small, keep_plan(4))
    least = smallest_peak_bytes(Pipeline((small,), 4))
    budget = int(least + share * (keep.peak_bytes - least))
    some = pareto([*_few(6), *(profile for _, profile in solve(small, 4, budget).profiles)])
    everything = (simulate(small, plan_of(enumerate(order), 4)) for order in product(some, repeat=4))
    best = min(found.micro_batch_s for found in everything if found.peak_bytes <= budget)
    found = solve(small, 4, budget)
    assert found.simulation.peak_bytes <= budget
    assert found.seconds <= 1.01 * best
    assert found.lower_bound_s <= best
    assert len(options) < 30


@pytest.mark.parametrize("use_scipy", [True, False])
@pytest.mark.parametrize("gib", [20.0, 14.1, 11.5])
def test_never_over_the_budget(gib: float, use_scipy: bool) -> None:
    found = solve(setting_a(), 8, int(gib * GIB), use_scipy=use_scipy)
    replayed = simulate(setting_a(), plan_of(found.profiles, 8))
    assert replayed.peak_bytes == found.simulation.peak_bytes <= gib * GIB
    assert found.found_by == ("integer program" if use_scipy else "greedy")


#: (budget, what the best hand-written plan of that peak cost on the H200)
HAND_A = [(18.54, 0.012), (15.92, 0.015), (14.04, 0.027), (11.42, 0.079), (10.2, 0.13)]
HAND_B = [(33.3, 0.0105), (20.7, 0.13), (20.5, 0.085)]


@pytest.mark.parametrize(("setting", "gib", "slower"), [*(("a", *h) for h in HAND_A), *(("b", *h) for h in HAND_B)])
def test_no_more_than_a_point_slower_than_by_hand(setting: str, gib: float, slower: float) -> None:
    tried, layers = (setting_a(), 8) if setting == "a" else (setting_b(), 16)
    keep_s = simulate(tried, keep_plan(layers)).micro_batch_s
    assert solve(tried, layers, int(gib * GIB)).seconds / keep_s - 1 <= slower + 0.01


def test_a_budget_that_nothing_fits_names_the_least_that_does() -> None:
    with pytest.raises(Infeasible, match="smallest budget") as caught:
        solve(setting_a(), 8, 9 * GIB)
    assert 9 * GIB < caught.value.smallest_bytes < 10.5 * GIB
    assert solve(setting_a(), 8, caught.value.smallest_bytes).simulation.peak_bytes == caught.value.smallest_bytes


def test_host_memory_is_a_limit() -> None:
    limit = 2 * GIB
    found = solve(replace(setting_b(), host_limit_bytes=limit), 16, 40 * GIB)
    assert found.simulation.host_bytes <= limit
    assert solve(setting_b(), 16, 40 * GIB).simulation.host_bytes > limit


def test_without_host_memory_nothing_is_offloaded() -> None:
    found = solve(replace(setting_a(), host_limit_bytes=0), 8, 14 * GIB)
    assert found.simulation.offloaded_bytes == 0 and found.simulation.peak_bytes <= 14 * GIB


def test_what_fits_is_kept() -> None:
    found = solve(setting_a(), 8, 25 * GIB)
    assert found.found_by == "keep" and found.lower_bound_s == found.seconds
    assert plan_of(found.profiles, 8) == keep_plan(8)


def test_later_stages_have_lighter_plans() -> None:
    base = replace(setting_a(), size=4, micro_batches=8, gradients_grow=False)
    stages = tuple(
        replace(base, rank=rank, chunks=(tuple(range(2 * rank, 2 * rank + 2)),), weight_bytes=4 * GIB)
        for rank in range(4)
    )
    pipeline = Pipeline(stages, 8)
    found = decide(pipeline, 16 * GIB).prediction
    assert all(simulation.peak_bytes <= 16 * GIB for simulation in found.simulations)
    assert not found.plan.layers[0].idle and found.plan.layers[4].idle
    assert found.step_s == pytest.approx(max(s.micro_batch_s for s in found.simulations) * (8 + 3))


def test_the_smallest_peak_within_a_slowdown() -> None:
    pipeline = Pipeline((setting_a(),), 8)
    found = thriftiest(pipeline, 0.02).prediction
    assert found.step_s <= 1.02 * pipeline.keep.step_s
    assert found.peak_bytes < 15 * GIB


def test_the_frontier_goes_down_in_memory_and_up_in_time() -> None:
    rungs = frontier(Pipeline((setting_a(),), 8), 6)
    assert rungs[0].plan == keep_plan(8) and len(rungs) > 3
    for before, after in pairwise(rungs):
        assert after.peak_bytes < before.peak_bytes and after.step_s >= before.step_s
