from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainer.config.schema import Config
from trainer.report.launch import Launch
from trainer.report.observer import EffectRow, Observer, RunEnd, RunInfo, StepRecord
from trainer.report.reporter import Reporter
from trainer.report.screen import Screen

RESOLVED = "trainer:\n  steps: 12\n"

#: other programs rely on these
PROMISED = {
    "status", "steps", "losses", "val_loss", "tokens_per_s", "mfu", "forward_s", "backward_s", "step_s",
    "peak_allocated_bytes", "peak_saved_bytes", "kept_bytes", "offloaded_bytes", "recomputed_bytes", "versions",
    "hardware",
}  # fmt: skip


@pytest.fixture
def make_reporter(config: Config, tmp_path: Path) -> Callable[..., Reporter]:
    def make(**changes: Any) -> Reporter:
        screen = Screen(Console(file=io.StringIO(), width=100))
        return Reporter(config, tmp_path / "run", RESOLVED, screen=screen, launch=Launch(), **changes)

    return make


def result_of(tmp_path: Path) -> dict[str, Any]:
    text = (tmp_path / "run" / "result.json").read_text()
    loaded = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert isinstance(loaded, dict)
    return loaded


def metrics_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_run(
    make_reporter: Callable[..., Reporter],
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
    tmp_path: Path,
) -> None:
    with make_reporter() as reporter:
        observer: Observer = reporter
        observer.run_started(make_info())
        for step in range(1, 13):
            observer.step_done(make_step(step))
            if step == 1:
                observer.effects([EffectRow("mlp_act", "recompute", 4, 1536, "pays")])
        observer.evaluated(12, 2 / 3)
        observer.run_ended(RunEnd("completed", 2 / 3, ""))

    result = result_of(tmp_path)
    assert result.keys() >= PROMISED
    assert result["status"] == "completed"
    assert result["steps"] == 12
    assert result["losses"] == [1 / (3 * step) for step in range(1, 13)]
    assert result["val_loss"] == 2 / 3
    assert (result["step_s"], result["forward_s"], result["backward_s"]) == (0.5, 0.125, 0.25)
    assert result["tokens_per_s"] == 4096.0
    # the data sheet's 989.4e12 for an H200, two of them
    assert result["mfu"] == 4096 * 1e9 / (989.4e12 * 2)
    assert result["peak_allocated_bytes"] is None
    assert result["peak_saved_bytes"] == 3 << 20
    assert [result[f"{what}_bytes"] for what in ("kept", "offloaded", "recomputed")] == [2 << 20, 1 << 20, 1536]
    assert result["versions"] == {"torch": "2.13.0"}
    hardware = result["hardware"]
    assert (hardware["device"], hardware["driver"]) == ("NVIDIA H200", "570.1")
    assert (hardware["peak_flops_per_s"], hardware["peak_source"]) == (989.4e12, "data sheet")
    assert hardware["cores"] >= 1 and hardware["memory_bytes"] > 1 << 28
    assert result["effects"] == [
        {"name": "mlp_act", "action": "recompute", "layers": 4, "bytes": 1536, "remark": "pays"}
    ]
    assert (result["model"], result["recompute"], result["offload"], result["engine"]) == (
        "custom",
        "none",
        "none",
        "stash",
    )
    assert result["started_at"] <= result["ended_at"] and result["ended_at"].endswith("+00:00")

    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [*range(1, 13), 12]
    assert rows[0]["loss"] == 1 / 3 and rows[0]["tokens_per_s"] == 4096.0
    assert rows[-1] == {"step": 12, "val_loss": 2 / 3}
    assert (tmp_path / "run" / "config_resolved.yaml").read_text() == RESOLVED
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config_resolved.yaml",
        "metrics.jsonl",
        "plan.yaml",
        "result.json",
    ]


def test_a_run_that_raises_says_why(
    make_reporter: Callable[..., Reporter],
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), make_reporter() as reporter:
        reporter.run_started(make_info())
        reporter.step_done(make_step(1))
        raise RuntimeError("out of memory")
    result = result_of(tmp_path)
    assert (result["status"], result["message"]) == ("failed", "RuntimeError: out of memory")
    assert result["losses"] == [1 / 3]


def test_a_run_that_never_starts_leaves_every_key(make_reporter: Callable[..., Reporter], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), make_reporter():
        raise FileNotFoundError("no such corpus")
    result = result_of(tmp_path)
    assert result.keys() >= PROMISED
    assert (result["status"], result["message"]) == ("failed", "FileNotFoundError: no such corpus")
    assert (result["steps"], result["losses"], result["step_s"]) == (0, [], None)


def test_ctrl_c_is_an_interruption(make_reporter: Callable[..., Reporter], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), make_reporter():
        raise KeyboardInterrupt
    assert result_of(tmp_path)["status"] == "interrupted"


def test_an_error_after_the_end_changes_nothing(make_reporter: Callable[..., Reporter], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), make_reporter() as reporter:
        reporter.run_ended(RunEnd("diverged", None, "loss is nan at step 3"))
        raise RuntimeError("teardown")
    result = result_of(tmp_path)
    assert (result["status"], result["message"]) == ("diverged", "loss is nan at step 3")


def test_a_diverged_loss_is_null_in_json(
    make_reporter: Callable[..., Reporter],
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
    tmp_path: Path,
) -> None:
    with make_reporter() as reporter:
        reporter.run_started(make_info())
        reporter.step_done(make_step(1, loss=float("nan")))
        reporter.run_ended(RunEnd("diverged", None, "loss is nan at step 1"))
    assert result_of(tmp_path)["losses"] == [None]


def test_resume_in_the_same_folder_goes_on(
    make_reporter: Callable[..., Reporter],
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
    tmp_path: Path,
) -> None:
    with make_reporter() as reporter:
        reporter.run_started(make_info())
        for step in (1, 2, 3):
            reporter.step_done(make_step(step))
        reporter.run_ended(RunEnd("interrupted", None, "SIGTERM"))
    with make_reporter() as reporter:
        assert not (tmp_path / "run" / "result.json").exists()
        reporter.run_started(make_info(first_step=3, earlier_losses=[1 / 3, 1 / 6]))
        for step in (3, 4):
            reporter.step_done(make_step(step))
        reporter.run_ended(RunEnd("completed", None, ""))
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4]
    result = result_of(tmp_path)
    assert (result["steps"], result["losses"]) == (4, [1 / 3, 1 / 6, 1 / 9, 1 / 12])


def test_other_ranks_write_nothing(
    make_reporter: Callable[..., Reporter],
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("RANK", "1")
    with make_reporter() as reporter:
        reporter.run_started(make_info())
        reporter.step_done(make_step(1))
        reporter.evaluated(1, 2.0)
        reporter.run_ended(RunEnd("completed", 2.0, ""))
    assert list((tmp_path / "run").iterdir()) == []


def test_a_failing_rank_leaves_its_reason_unless_rank_0_did(
    make_reporter: Callable[..., Reporter], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError), make_reporter(rank=3):
        raise ValueError("bad shard")
    assert result_of(tmp_path)["message"] == "rank 3: ValueError: bad shard"
    with pytest.raises(ValueError), make_reporter(rank=2):
        raise ValueError("peer gone")
    assert result_of(tmp_path)["message"] == "rank 3: ValueError: bad shard"


def test_no_module_imports_torch_or_wandb() -> None:
    code = (
        "import sys, pkgutil, importlib, trainer.report as package\n"
        "for found in pkgutil.iter_modules(package.__path__): importlib.import_module('trainer.report.' + found.name)\n"
        "print(sorted({'torch', 'wandb', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


ROOT = Path(__file__).resolve().parents[3]
