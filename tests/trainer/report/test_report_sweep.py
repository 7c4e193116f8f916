"""Sweeps are read from what jobs leave in their folders: here written by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from trainer.config.schema import Config, LoggerConfig, WandbMode
from trainer.report.frontier import frontier
from trainer.report.sweep import Job, compare, job_folders, pareto, read_jobs
from trainer.report.sweep_report import report_sweep
from trainer.report.sweep_table import csv_text, markdown, print_sweep

MakeJob = Callable[..., Path]

OPTIONS = ["recompute=none", "recompute=selective", "recompute=full"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return tmp_path / "night"


@pytest.fixture
def make_job(sweep: Path) -> MakeJob:
    """A job's folder as a completed run leaves it; `status=None`: without a result."""

    def make(number: int, *overrides: str, **changes: Any) -> Path:
        folder = sweep / str(number)
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["trainer.steps=2", *overrides]))
        result: dict[str, Any] = {
            "status": "completed",
            "message": "",
            "losses": [1 / 3, 0.1 + 0.2],
            "val_loss": 0.25,
            "step_s": 0.1,
            "tokens_per_step": 1000,
            "peak_saved_bytes": 4 << 20,
            "peak_allocated_bytes": None,
            "offloaded_bytes": 0,
            "recomputed_bytes": 1 << 20,
            "engine": "stash",
            "world_size": 1,
            "started_at": "2030-01-31T12:00:00+00:00",
            "versions": {"torch": "2.13.0", "megatron-core": "0.16.1"},
            "hardware": {"device": "NVIDIA H200"},
        } | changes
        if result["status"] is not None:
            (folder / "result.json").write_text(json.dumps(result))
        return folder

    return make


@pytest.fixture
def three_and_a_failure(make_job: MakeJob) -> None:
    make_job(0, "recompute=selective", step_s=0.11, peak_saved_bytes=3 << 20)
    make_job(1, "recompute=none", recomputed_bytes=0)
    make_job(2, "recompute=full", step_s=0.2, losses=[1 / 3, 0.3], val_loss=0.5, peak_saved_bytes=3 << 20)
    make_job(10, "recompute=odd", status="failed", message="recompute: odd is no option", step_s=None)


def test_the_front_leaves_out_what_another_dominates() -> None:
    points = {"fast": (1.0, 9.0), "small": (3.0, 2.0), "worse": (3.0, 9.0), "twin": (1.0, 9.0), "unknown": (None, 1.0)}
    assert pareto(points) == {"fast", "small", "twin"}
    assert pareto({}) == set()


@pytest.mark.usefixtures("three_and_a_failure")
def test_jobs_are_compared_with_the_one_that_keeps_everything(sweep: Path) -> None:
    rows = compare(read_jobs(sweep))
    assert [row.job.number for row in rows] == ["0", "1", "2", "10"]
    assert [row.label for row in rows] == ["recompute=selective", "recompute=none", "recompute=full", "recompute=odd"]
    assert [row.short_label for row in rows] == ["selective", "none", "full", "odd"]
    assert [row.is_baseline for row in rows] == [False, True, False, False]
    assert [row.step_change for row in rows] == [pytest.approx(0.1), 0.0, pytest.approx(1.0), None]
    assert [row.peak_change for row in rows] == [-0.25, 0.0, -0.25, None]
    # 0.1 + 0.2 is not 0.3
    assert [row.losses_equal for row in rows] == [True, True, False, None]
    assert [row.on_front for row in rows] == [True, True, False, False]


def test_without_such_a_job_the_first_that_completed_is_the_baseline(sweep: Path, make_job: MakeJob) -> None:
    make_job(0, "recompute=full", status="failed")
    make_job(1, "recompute=selective")
    make_job(2, "engine=megatron", recomputed_bytes=0, engine="megatron")
    assert [row.is_baseline for row in compare(read_jobs(sweep))] == [False, True, False]


def test_times_are_compared_by_the_token(sweep: Path, make_job: MakeJob) -> None:
    make_job(0, "trainer.micro_batch_size=1", recomputed_bytes=0)
    make_job(1, "trainer.micro_batch_size=2", step_s=0.15, tokens_per_step=2000)
    rows = compare(read_jobs(sweep))
    assert rows[1].step_change == pytest.approx(-0.25)
    assert [row.short_label for row in rows] == ["micro_batch_size=1", "micro_batch_size=2"]


def test_the_peak_is_the_allocators_where_there_is_one(sweep: Path, make_job: MakeJob) -> None:
    make_job(0, peak_allocated_bytes=5 << 30)
    make_job(1)
    assert [job.peak_bytes for job in read_jobs(sweep)] == [5 << 30, 4 << 20]


def test_only_folders_of_jobs_are_jobs(sweep: Path, make_job: MakeJob) -> None:
    make_job(3, status=None)
    (sweep / "wandb" / "run").mkdir(parents=True)
    (sweep / "sweep.csv").touch()
    assert [folder.name for folder in job_folders(sweep)] == ["3"]
    assert [job.status for job in read_jobs(sweep)] == ["no result"]


@pytest.mark.usefixtures("three_and_a_failure")
def test_table_on_the_screen(sweep: Path) -> None:
    out = io.StringIO()
    print_sweep(compare(read_jobs(sweep)), Console(file=out, width=100))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["0*", "recompute=selective", "same", "110.0", "ms", "+10.0%", "3.00", "MiB", "-25.0%", "0.2500"] in lines
    assert ["1*", "recompute=none", "base", "100.0", "ms", "-", "4.00", "MiB", "-", "0.2500"] in lines
    assert ["2", "recompute=full", "other", "200.0", "ms", "+100.0%", "3.00", "MiB", "-25.0%", "0.5000"] in lines
    assert "job 10 (recompute=odd) failed: recompute: odd is no option" in out.getvalue().splitlines()


def test_validation_losses_are_left_out_where_all_are_the_same(sweep: Path, make_job: MakeJob) -> None:
    make_job(0, "recompute=none", recomputed_bytes=0)
    make_job(1, "recompute=full")
    make_job(2, "recompute=odd", status="failed", val_loss=None)
    assert "val loss" not in markdown("night", compare(read_jobs(sweep)), [])


@pytest.mark.usefixtures("three_and_a_failure")
def test_markdown_page(sweep: Path) -> None:
    page = markdown("night", compare(read_jobs(sweep)), ["sweep.png"])
    assert page.startswith("# Sweep night\n\nAll jobs: `trainer.steps=2`\n")
    assert "| 0\\* | recompute=selective | same | 110.0 ms | +10.0% | 3.00 MiB | -25.0% | 0.2500 |" in page
    assert "- job 10 (recompute=odd) failed: recompute: odd is no option" in page
    assert "![sweep.png](sweep.png)" in page
    assert page.endswith("1 x NVIDIA H200; torch 2.13.0, megatron-core 0.16.1; 2030-01-31\n")


@pytest.mark.usefixtures("three_and_a_failure")
def test_csv_has_a_row_a_job_at_full_precision(sweep: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(compare(read_jobs(sweep))))))
    assert [row["job"] for row in rows] == ["0", "1", "2", "10"]
    assert [row["recompute"] for row in rows] == ["selective", "none", "full", "odd"]
    assert {row["trainer.steps"] for row in rows} == {"2"}
    assert float(rows[0]["step_change"]) == 0.11 / 1000 / (0.1 / 1000) - 1
    assert [row["on_front"] for row in rows] == ["True", "True", "False", "False"]
    assert (rows[3]["status"], rows[3]["step_s"], rows[3]["message"]) == ("failed", "", "recompute: odd is no option")


@pytest.mark.usefixtures("three_and_a_failure")
def test_a_report_is_the_same_when_made_again(sweep: Path, config: Config) -> None:
    failed = report_sweep(sweep, config, Console(file=io.StringIO()))
    assert [row.job.number for row in failed] == ["10"]
    names = ("sweep.md", "sweep.csv", "sweep.png")
    before = {name: (sweep / name).read_bytes() for name in names}
    assert before["sweep.png"].startswith(b"\x89PNG")
    report_sweep(sweep, config, Console(file=io.StringIO()))
    assert {name: (sweep / name).read_bytes() for name in names} == before


def test_a_sweep_in_which_all_failed_is_reported_without_a_picture(
    sweep: Path, make_job: MakeJob, config: Config
) -> None:
    make_job(0, "recompute=none", status="failed", message="out of memory")
    make_job(1, "recompute=full", status=None)
    assert len(report_sweep(sweep, config, Console(file=io.StringIO()))) == 2
    assert not (sweep / "sweep.png").exists()
    assert "failed: out of memory" in (sweep / "sweep.md").read_text()


@pytest.mark.usefixtures("three_and_a_failure")
def test_the_sweep_is_a_wandb_run_of_its_own_also_offline(sweep: Path) -> None:
    config = Config(logger=LoggerConfig(wandb_mode=WandbMode.offline))
    report_sweep(sweep, config, Console(file=io.StringIO()))
    (run,) = (sweep / "wandb").glob("offline-run-*")
    assert {path.suffix for path in run.rglob("files/media/**/*") if path.is_file()} == {".json", ".png"}


def test_frontier_measures_against_the_mean_of_both_keeps(sweep: Path, make_job: MakeJob) -> None:
    first = make_job(0, "experiment=frontier_a", "logger.name=keep", recomputed_bytes=0, step_s=0.1)
    make_job(1, "experiment=frontier_a", "logger.name=native_full", "engine=megatron", engine="megatron", step_s=0.14)
    make_job(2, "experiment=frontier_a", "logger.name=ours", "plan=file", step_s=0.11, peak_allocated_bytes=7)
    failed = {"status": "failed", "message": "offload: no GPU"}
    (make_job(3, "experiment=frontier_a", "logger.name=native_offload", "engine=megatron") / "result.json").write_text(
        json.dumps(failed)
    )
    make_job(4, "experiment=frontier_a", "logger.name=keep_last", recomputed_bytes=0, step_s=0.12)
    model = {"name": "llama", "num_layers": 8, "hidden_size": 16, "vocab_size": 32, "seq_length": 64}
    config = {"model": model, "trainer": {"micro_batch_size": 4, "steps": 8}, "optim": {"name": "none"}}
    (first / "config_resolved.yaml").write_text(yaml.safe_dump(config))
    measured = frontier(sweep, read_jobs(sweep))
    assert measured["drift"] == pytest.approx(0.2)
    assert measured["setting"]["experiment"] == "frontier_a"
    assert measured["setting"]["model.seq_length"] == 64
    assert measured["date"] == "2030-01-31"
    rows = {row["name"]: row for row in measured["rows"]}
    assert list(rows) == ["keep", "native_full", "ours", "native_offload", "keep_last"]
    assert rows["native_full"]["added"] == pytest.approx(0.14 / 0.11 - 1)
    assert rows["ours"]["added"] == pytest.approx(0)
    assert rows["ours"]["overrides"] == ["plan=file"]
    assert (rows["ours"]["peak_bytes"], rows["ours"]["losses_equal"], rows["ours"]["d2h_gbps"]) == (7, True, None)
    assert rows["native_offload"]["engine"] == "megatron"
    assert (rows["native_offload"]["added"], rows["native_offload"]["failed"]) == (None, "offload: no GPU")
    assert "failed" not in rows["ours"]


def test_a_frontier_is_drawn_at_the_end_of_its_sweep(sweep: Path, make_job: MakeJob, config: Config) -> None:
    for number, name in enumerate(("keep", "native_full", "ours_act", "keep_last")):
        folder = make_job(
            number, "experiment=frontier_b", f"logger.name={name}", recomputed_bytes=0 if "keep" in name else 9
        )
        model = {"name": "llama", "num_layers": 8, "hidden_size": 16, "vocab_size": 32, "seq_length": 64}
        resolved = {"model": model, "trainer": {"micro_batch_size": 4, "steps": 8}, "optim": {"name": "none"}}
        (folder / "config_resolved.yaml").write_text(yaml.safe_dump(resolved))
    report_sweep(sweep, config, Console(file=io.StringIO()))
    assert (sweep / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((sweep / "frontier.json").read_text())["rows"]) == 4
    assert "![frontier.png](frontier.png)" in (sweep / "sweep.md").read_text()


def test_rows_of_one_name_are_told_apart_by_what_else_they_were_told() -> None:
    told = [("logger.name=cheap", "seq=1"), ("logger.name=full", "seq=1"), ("logger.name=full", "seq=2")]
    rows = compare([Job(str(number), overrides, {}) for number, overrides in enumerate(told)])
    assert [row.label for row in rows] == ["cheap", "full seq=1", "full seq=2"]
