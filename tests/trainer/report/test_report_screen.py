from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest
from rich.console import Console

from trainer.config.schema import Config
from trainer.plan import ShownPlan
from trainer.report.observer import EffectRow, RunEnd, RunInfo, StepRecord
from trainer.report.screen import Screen
from trainer.report.summary import Summary, Tally, summarise
from trainer.report.throughput import MEASURED, Peak, Throughput

PLAN = ShownPlan(
    "",
    ["site", "MiB", "layers 0-2", "layers 3"],
    [["fc1_out", "1.00", "[offload]", "keep"]],
    ["chosen since it is cheap"],
)
THROUGHPUT = Throughput(1e9, 2, Peak(1e13, MEASURED))


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_a_line_each_log_every_steps(
    make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord]
) -> None:
    console = plain_console()
    screen = Screen(console)
    screen.start(make_info(), THROUGHPUT, PLAN)
    for step in range(1, 13):
        screen.step(make_step(step))
    screen.evaluated(12, 1.23456)
    lines = text_of(console).splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert lines[0] == (
        "custom: 1.23 M parameters, 2,048 tokens a step, 2 x NVIDIA H200, peak 10.0 TFLOP/s (measured by matmul)"
    )
    assert [line.split("/")[0] for line in steps] == [
        "step  1",
        "step  5",
        "step 10",
        "step 12",
        "step 12  validation loss 1.2346",
    ]
    # 7 steps of half a second are left
    assert steps[1] == ("step  5/12  loss 0.0667  lr 1.00e-03  4,096 tokens/s  MFU 20.5%  saved 3.00 MiB  left 0:00:04")


def test_live_on_a_terminal(
    make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("trainer.report.screen._REFRESH_S", 0.0)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    screen = Screen(console)
    screen.start(make_info(), THROUGHPUT, PLAN)
    screen.step(make_step(1))
    screen.step(make_step(2))
    screen.close()
    screen.close()
    text = text_of(console)
    assert "2/12" in text
    assert "loss 0.1667" in text
    assert "step  1/12" not in text
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_live_display_takes_log_lines_and_gives_the_stream_back(
    make_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler(sys.__stdout__)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    screen = Screen(console)
    screen.start(make_info(), THROUGHPUT, PLAN)
    logging.getLogger("somewhere").warning("look here")
    screen.close()
    assert "look here" in text_of(console)
    assert handler.stream is sys.__stdout__


def closing(config: Config, info: RunInfo, steps: list[StepRecord], effects: list[EffectRow]) -> Summary:
    tally = Tally(effects=effects)
    for step in steps:
        tally.add(step)
    return summarise(
        config,
        tally,
        RunEnd("completed", 1.5, ""),
        info,
        THROUGHPUT,
        {"device": info.device_name, "peak_source": MEASURED},
        "start",
        "end",
    )


def test_closing_tables(
    config: Config, make_info: Callable[..., RunInfo], make_step: Callable[..., StepRecord]
) -> None:
    effects = [
        EffectRow("mlp_act", "recompute", 4, 14 << 20, ""),
        EffectRow("core_attn", "recompute", 0, 0, "[attention] is fused"),
    ]
    console = plain_console()
    Screen(console).final(closing(config, make_info(), [make_step(1), make_step(2)], effects), "runs/one")
    rows = [line.split(maxsplit=1) for line in text_of(console).splitlines() if line.strip()]
    facts = {row[0]: " ".join(row[1].split()) for row in rows if len(row) > 1}
    assert facts["status"] == "completed"
    assert facts["device"] == "2 x NVIDIA H200"
    assert facts["loss"] == "0.3333 -> 0.1667"
    assert facts["validation"] == "loss 1.5000"
    assert facts["tokens/s"] == "4,096"
    assert facts["MFU"] == "20.5% of a measured peak"
    assert facts["step"] == "500.0 ms (forward 125.0 ms, backward 250.0 ms)"
    assert facts["peak"] == "saved 3.00 MiB"
    assert facts["a"] == "step kept 2.00 MiB, offloaded 1.00 MiB, recomputed 1.50 KiB"
    assert facts["mlp_act"] == "recompute 4 14.00 MiB"
    assert facts["core_attn"] == "recompute 0 0 B [attention] is fused"


def test_closing_table_of_a_run_that_never_began(config: Config) -> None:
    console = plain_console()
    summary = summarise(config, Tally(), RunEnd("failed", None, "no data"), None, None, {}, "start", "end")
    Screen(console).final(summary, "runs/one")
    assert "failed, no data" in text_of(console)


def test_the_plan_is_shown_at_the_start(make_info: Callable[..., RunInfo]) -> None:
    console = plain_console()
    Screen(console).start(make_info(), THROUGHPUT, PLAN)
    lines = [line.split() for line in text_of(console).splitlines()]
    assert ["site", "MiB", "layers", "0-2", "layers", "3"] in lines
    assert ["fc1_out", "1.00", "[offload]", "keep"] in lines
    assert ["chosen", "since", "it", "is", "cheap"] in lines
