from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainer.report.metrics import flat, interval_metrics
from trainer.report.observer import Copies, Interval, RankUse, StepRecord
from trainer.report.throughput import Peak, Throughput

GIB = 1 << 30
RANK = RankUse(
    rank=0,
    stage=0,
    forward_s=0.1,
    backward_s=0.3,
    optimizer_s=0.05,
    stall_s=0.01,
    peak_saved_bytes=10,
    peak_allocated_bytes=60 * GIB,
    peak_reserved_bytes=70 * GIB,
    device_bytes=80 * GIB,
    host_pool_bytes=3 * GIB,
    host_limit_bytes=4 * GIB,
    rss_bytes=5 * GIB,
)
OTHER = replace(RANK, rank=1, stage=1, backward_s=0.2, stall_s=0.02, peak_allocated_bytes=30 * GIB, peak_saved_bytes=7)
COPIES = Copies(100, 2.0, 90, 3.0, 62.5, 60.0, 101, None)


def row(make_step: Callable[..., StepRecord], **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "step": 7,
        "under": "plan",
        "ranks": [RANK, OTHER],
        "categories": {"stash": 10},
        "sites": {"fc1_out": {"offload": 5}},
        "copies": COPIES,
        "recomputed_flops_per_token": {"mlp": 1e8, "core_attn": 1e8},
        "delta": None,
    }
    throughput = Throughput(flops_per_token=1e9, world_size=2, peak=Peak(1e13, "data sheet"))
    return interval_metrics(Interval(**(fields | changes)), make_step(7), throughput)


def test_hfu_is_mfu_and_what_is_done_again(make_step: Callable[..., StepRecord]) -> None:
    # 4096 tokens/s of 1e9 FLOPs on two devices of 1e13, and a fifth again
    found = row(make_step)
    assert found["hfu"] == pytest.approx(4096 * 1e9 / 2e13 * 1.2)
    assert found["recomputed_flops"] == pytest.approx(0.2)


def test_extremes_over_ranks_and_stages(make_step: Callable[..., StepRecord]) -> None:
    found = row(make_step)
    assert (found["peak_allocated_bytes_max"], found["peak_allocated_bytes_min"]) == (60 * GIB, 30 * GIB)
    assert (found["peak_saved_bytes_max"], found["peak_saved_bytes_min"]) == (10, 7)
    assert found["peak_device_share"] == 0.75
    assert found["peak_by_stage_bytes"] == {"0": 60 * GIB, "1": 30 * GIB}
    assert (found["backward_s_max"], found["stall_s"], found["host_pool_bytes"]) == (0.3, 0.02, 6 * GIB)


def test_without_a_gpu_the_allocator_has_no_numbers(make_step: Callable[..., StepRecord]) -> None:
    bare = replace(RANK, peak_allocated_bytes=None, peak_reserved_bytes=None, device_bytes=None)
    found = row(make_step, ranks=[bare])
    assert (found["peak_allocated_bytes_max"], found["peak_device_share"]) == (None, None)
    assert found["peak_by_stage_bytes"] == {"0": 10}


def test_copy_rates_are_bytes_over_time_and_shares_of_the_link(make_step: Callable[..., StepRecord]) -> None:
    found = row(make_step)
    assert (found["copy_out_bytes_per_s"], found["copy_back_bytes_per_s"]) == (50.0, 30.0)
    assert (found["copy_out_link_share"], found["copy_back_link_share"]) == (0.8, 0.5)
    assert (found["counted_out_bytes"], found["counted_back_bytes"]) == (101, None)
    assert row(make_step, copies=None)["copy_out_bytes_per_s"] is None


def test_flat_joins_names() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": 2}, "e": None}) == {"a/b/c": 1, "a/d": 2, "e": None}
