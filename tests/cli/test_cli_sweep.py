"""Sweeps by the command line: each job in processes of its own, and the report at the end."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

TRAIN = Path(__file__).parents[2] / "train.py"
Cli = Callable[..., "subprocess.CompletedProcess[str]"]

SMOKE = ["experiment=smoke", "trainer.steps=2", "logger=none", "data=mock", "hydra.sweep.dir=sweep"]


def result(sweep: Path, job: int) -> dict[str, Any]:
    return dict(json.loads((sweep / str(job) / "result.json").read_text()))


@pytest.mark.slow
def test_a_failing_job_does_not_stop_the_sweep_and_is_named(cli: Cli, tmp_path: Path) -> None:
    arguments = ["-m", *SMOKE, "optim=sgd", "optim.clip_grad=0", "optim.lr=1e30,0.1"]
    done = cli(*arguments)
    assert done.returncode == 1
    sweep = tmp_path / "sweep"
    assert [result(sweep, job)["status"] for job in (0, 1)] == ["diverged", "completed"]
    assert "#0  optim.lr=1e+30: diverged: " in done.stdout
    assert "#1  optim.lr=0.1: completed, " in done.stdout
    assert "job 0 (optim.lr=1e+30) diverged: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "step 2/2" in (sweep / "1" / "launch.log").read_text()
    rows = list(csv.DictReader((sweep / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["diverged", "completed"]
    assert (sweep / "sweep.png").read_bytes().startswith(b"\x89PNG")

    page = (sweep / "sweep.md").read_text()
    (sweep / "sweep.md").unlink()
    assert cli("report=sweep", "logger=none").returncode == 0
    assert (sweep / "sweep.md").read_text() == page

    before = result(sweep, 1)
    again = cli(*arguments, "hydra.launcher.resume=true")
    assert "#1  optim.lr=0.1: completed earlier" in again.stdout
    assert result(sweep, 1) == before
    assert again.returncode == 1


@pytest.mark.slow
def test_a_job_of_two_processes_with_a_teams_library_and_odd_signs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "team conf" / "team").mkdir(parents=True)
    (tmp_path / "team conf" / "team" / "acme.yaml").write_text(
        "# @package _global_\nteam: acme\nmodel: {hidden_size: 64}\n"
    )
    tags = "logger.tags=['it\\'s, a \"tag\" = 1','b c']"
    done = cli(
        *("--config-dir", "team conf", "-m", *SMOKE, "hydra.sweep.dir='it\\'s a sweep'", "+team=acme", tags),
        *("parallel=tensor2", "hydra.launcher.nproc_per_node=2"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = tmp_path / "it's a sweep"
    assert result(sweep, 0)["world_size"] == 2
    config = yaml.safe_load((sweep / "0" / "config_resolved.yaml").read_text())
    assert (config["team"], config["model"]["hidden_size"]) == ("acme", 64)
    assert config["logger"]["tags"] == ['it\'s, a "tag" = 1', "b c"]


@pytest.mark.slow
def test_a_stopped_sweep_saves_its_job_reports_and_goes_on_later(cli: Cli, tmp_path: Path) -> None:
    arguments = ["-m", *SMOKE, "trainer.steps=40", "recompute=none,full"]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    sweep = tmp_path / "sweep"
    with subprocess.Popen(
        [sys.executable, str(TRAIN), *arguments], cwd=tmp_path, env=alone, stdout=subprocess.PIPE, text=True
    ) as running:
        metrics, patience_s = sweep / "0" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.is_file() and metrics.stat().st_size):
            assert time.monotonic() < patience_s and running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM
    assert result(sweep, 0)["status"] == "interrupted"
    assert "job 0 (" in said and "interrupted: " in said
    assert not (sweep / "1").exists()
    steps = result(sweep, 0)["steps"]
    assert 0 < steps < 40

    done = cli(*arguments, "hydra.launcher.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on at step {steps + 1}" in (sweep / "0" / "launch.log").read_text()
    assert [result(sweep, job)["steps"] for job in (0, 1)] == [40, 40]
    assert result(sweep, 0)["losses"] == result(sweep, 1)["losses"]


@pytest.mark.slow
def test_frontier_goes_on_after_options_that_this_machine_can_not_run(cli: Cli, tmp_path: Path) -> None:
    small = ["model=tiny", "model.num_layers=8", "model.seq_length=32", "model.vocab_size=256", "trainer.steps=2"]
    rows = "hydra.sweeper.only=[keep,native_fine_grained,ours_act]"
    done = cli(
        *("-m", "experiment=frontier_a", *small, rows, "logger=none", "hydra.sweep.dir=sweep"), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 1, done.stdout + done.stderr
    measured = json.loads((tmp_path / "sweep" / "frontier.json").read_text())
    keep, native, ours = measured["rows"]
    assert (keep["name"], keep["added"], keep["losses_equal"]) == ("keep", 0.0, True)
    assert "needs a GPU" in native["failed"]
    assert ours["losses_equal"] is True
    assert ours["peak_bytes"] < keep["peak_bytes"]
    assert (tmp_path / "sweep" / "frontier.png").is_file()


@pytest.mark.slow
def test_other_launchers_sweeps_are_reported_too(cli: Cli, tmp_path: Path) -> None:
    seeds = "trainer.seed=1,-1,2"
    done = cli("-m", *SMOKE, "hydra/launcher=inline", seeds, "hydra.launcher.check_first=false")
    assert done.returncode == 1, done.stderr
    assert "trainer.seed" in done.stderr + done.stdout
    rows = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    completed = [(row["job"], row["trainer.seed"]) for row in rows if row["status"] == "completed"]
    assert (completed, len(rows)) == ([("0", "1"), ("2", "2")], 3)
    assert "trainer.seed: -1" in json.loads((tmp_path / "sweep" / "1" / "result.json").read_text())["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "parallel=tensor2,single"], "Add hydra/launcher=process hydra.launcher.nproc_per_node=2"),
        (["-m", "parallel=tensor8", "model=llama3_8b", "hydra.launcher.nproc_per_node=2"], "multiple of 8 processes"),
        (["-m", "hydra.launcher.nprocs=2"], "there is no such key"),
        (["-m", "hydra.launcher.timeout_s=soon"], "hydra.launcher.timeout_s: "),
        (["-m", "recompute=none,full", "offload=layerwise", "engine=megatron"], "Megatron's offloading needs a GPU"),
        (["report=nowhere"], "report: there is no folder nowhere"),
        (["report=."], "holds no jobs of a sweep"),
    ],
)
def test_bad_sweeps_are_refused_before_they_start(cli: Cli, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = cli(*arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_search_prunes_what_is_refused_and_names_the_best(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        *("-m", *SMOKE, "hydra/sweeper=search", "objective=token_s", "hydra.launcher.check_first=false"),
        *("recompute=full,none", "recompute.num_layers=1,9"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = tmp_path / "sweep"
    found = yaml.safe_load((sweep / "search.yaml").read_text())
    best = found["best"]
    assert (best["overrides"], found["trials"], found["pruned"]) == (["recompute=full", "recompute.num_layers=1"], 4, 3)
    told = result(sweep, best["job"])
    assert best["value"] == told["step_s"] / told["tokens_per_step"]
    assert best["peak_bytes"] == told["peak_saved_bytes"]
    rows = list(csv.DictReader((sweep / "sweep.csv").open()))
    assert sorted(row["status"] for row in rows) == ["completed", "pruned", "pruned", "pruned"]
    assert "best of 4 trials (3 pruned): " in done.stdout
