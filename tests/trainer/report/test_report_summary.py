from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainer.config.schema import Config, PlanConfig, PlanSource
from trainer.report.observer import RunEnd, RunInfo, StepRecord
from trainer.report.summary import Summary, Tally, summarise
from trainer.report.throughput import Peak, Throughput

DONE = RunEnd("completed", 1.5, "")


def summary_of(config: Config, info: RunInfo, steps: list[StepRecord], end: RunEnd = DONE) -> Summary:
    tally = Tally()
    for step in steps:
        tally.add(step)
    throughput = Throughput(info.flops_per_token, info.world_size, Peak(1e13, "data sheet"))
    return summarise(config, tally, end, info, throughput, {}, "start", "end")


def test_medians_leave_warm_up_out(
    config: Config, make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord]
) -> None:
    times = [9.0, 8.0, 7.0, 0.25, 0.5, 1.0]
    steps = [make_step(i, step_s=s, forward_s=s / 4, backward_s=s / 2) for i, s in enumerate(times, 1)]
    summary = summary_of(config, make_info(), steps)
    assert (summary.step_s, summary.forward_s, summary.backward_s) == (0.5, 0.125, 0.25)
    assert summary.tokens_per_s == 2048 / 0.5
    # 4096 tokens/s x 1e9 FLOPs over 2 devices of 1e13
    assert summary.mfu == pytest.approx(0.2048)


@pytest.mark.parametrize(("times", "median"), [([4.0], 4.0), ([4.0, 1.0], 1.0), ([9.0, 9.0, 9.0, 2.0], 2.0)])
def test_short_runs_keep_at_least_the_last_step(
    times: list[float],
    median: float,
    config: Config,
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
) -> None:
    steps = [make_step(i, step_s=s) for i, s in enumerate(times, 1)]
    assert summary_of(config, make_info(), steps).step_s == median


def test_memory_is_the_largest_peak_and_the_last_flow(
    config: Config, make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord]
) -> None:
    steps = [
        make_step(1, peak_saved_bytes=700, peak_allocated_bytes=9000, kept_bytes=1, offloaded_bytes=2),
        make_step(2, peak_saved_bytes=500, peak_allocated_bytes=8000, kept_bytes=3, offloaded_bytes=4),
    ]
    summary = summary_of(config, make_info(), steps)
    assert (summary.peak_saved_bytes, summary.peak_allocated_bytes) == (700, 9000)
    assert (summary.kept_bytes, summary.offloaded_bytes, summary.recomputed_bytes) == (3, 4, 1536)


def test_resumed_run_counts_and_lists_all_steps(
    config: Config, make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord]
) -> None:
    info = make_info(first_step=3, earlier_losses=[5.5, 5.25])
    summary = summary_of(config, info, [make_step(3, loss=5.0)])
    assert summary.steps == 3
    assert summary.losses == [5.5, 5.25, 5.0]


def test_cpu_has_no_allocator_peak(
    config: Config, make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord]
) -> None:
    assert summary_of(config, make_info(), [make_step(1)]).peak_allocated_bytes is None


def test_what_decided_over_tensors(config: Config, make_info: Callable[..., RunInfo]) -> None:
    assert summary_of(config, make_info(), []).memory_options == "recompute=none offload=none"
    auto = replace(config, plan=PlanConfig(PlanSource.auto, budget="8GiB"))
    assert summary_of(auto, make_info(), []).memory_options == "plan=auto"
