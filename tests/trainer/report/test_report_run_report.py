from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memory.plan import LayerPlan, Plan
from memory.sites import LayerShape
from trainer.config.schema import Config
from trainer.report.baseline import Choice
from trainer.report.observer import Advice, Copies, Interval, RankUse, RunEnd, RunInfo, StepRecord
from trainer.report.run_report import write_report
from trainer.report.summary import Tally, summarise
from trainer.report.throughput import Peak, Throughput

GIB = 1 << 30
SHAPE = LayerShape(
    seq_length=64, micro_batch_size=1, hidden=32, ffn=64, heads=4, query_width=32, kv_width=16, gated=True,
    fused_attention=True, element_bytes=2,
)  # fmt: skip
PLAN = Plan(layers=(LayerPlan(offload=frozenset({"fc1_out"})),) * 3)
RANK = RankUse(0, 0, 0.1, 0.2, 0.05, 0.003, 6 * GIB, 60 * GIB, 70 * GIB, 80 * GIB, 3 * GIB, 4 * GIB, 5 * GIB)
KEPT = Interval(3, "keep", [RANK], {"weights": 2 * GIB, "stash": 40 * GIB}, {}, None, {}, None)
PLANNED = Interval(
    step=12,
    under="plan",
    ranks=[RANK, replace(RANK, rank=1, stage=1, peak_allocated_bytes=50 * GIB, stall_s=0.004)],
    categories={"weights": 2 * GIB, "stash": 10 * GIB},
    sites={"fc1_out": {"offload": 3 * GIB, "recompute": GIB}},
    copies=Copies(3 * GIB, 0.06, 3 * GIB, 0.07, 55e9, 55e9, None, None),
    recomputed_flops_per_token={"fc1_out": 1e8},
    delta=None,
)


@pytest.fixture
def report(
    config: Config, make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord], tmp_path: Path
) -> Callable[..., tuple[str, list[str]]]:
    def make(*intervals: Interval, plan: Plan | None = PLAN, **changes: Any) -> tuple[str, list[str]]:
        tally, info = Tally(), make_info(plan=plan, **changes)
        for step in range(1, 13):
            lead_in = step <= 4
            # warm-up in both: the medians are those of the last step before and of the last five under the plan
            tally.add(make_step(step, under="keep" if lead_in else "plan", step_s=0.4 if lead_in else 0.5))
        for interval in intervals:
            tally.note(interval)
        tally.advice.append(Advice("peak", "too much", "offload=fine_grained"))
        throughput = Throughput(info.flops_per_token, 2, Peak(1e13, "data sheet"))
        summary = summarise(config, tally, RunEnd("completed", None, ""), info, throughput, {"device": "X"}, "", "")
        pictures = write_report(tmp_path, summary, tally, plan, SHAPE)
        path = tmp_path / "report.md"
        return path.read_text() if path.exists() else "", [picture.name for picture in pictures]

    return make


def test_before_and_after_in_time_and_memory(report: Callable[..., tuple[str, list[str]]], tmp_path: Path) -> None:
    text, pictures = report(KEPT, PLANNED, baseline=Choice(""))
    assert pictures == ["memory.png", "time.png", "plan.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    for line in (
        "| step | 500.0 ms | 400.0 ms | +25.0% |",
        "| forward | 125.0 ms | 125.0 ms | +0.0% |",
        # 4096 tokens/s of 1e9 FLOPs on two of 1e13, and a tenth again
        "MFU 20.5%, a drop of 20.0%; HFU 22.5% with the 10.0% of the FLOPs that are done again; "
        "4.0 ms of a step compute stood still for copies.",
        "| stash | 40.00 GiB | 10.00 GiB |",
        "| all | 42.00 GiB | 12.00 GiB |",
        "Largest peak of each pipeline stage: stage 0: 60.00 GiB, stage 1: 50.00 GiB.",
        "| fc1_out |   | 3.00 GiB | 1.00 GiB |",
        "| to the host | 3.00 GiB | 53.7 GB/s | 55.0 GB/s | 97.6% | - |",
        "- too much (guard.peak): offload=fine_grained",
    ):
        assert line in text.splitlines(), line


def test_without_plan_or_baseline_there_is_less_to_show(report: Callable[..., tuple[str, list[str]]]) -> None:
    text, pictures = report(replace(PLANNED, copies=None), plan=None, baseline=Choice("", scale=4.0, lead_in=None))
    assert pictures == ["memory.png", "time.png"]
    assert "## Link" not in text and "plan.png" not in text


def test_before_the_first_interval_there_is_no_report(report: Callable[..., tuple[str, list[str]]]) -> None:
    assert report(KEPT) == ("", [])
