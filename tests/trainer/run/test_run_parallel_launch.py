"""Processes started by others than torchrun: submitit on this machine, and the presets of launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.arguments import parse_arguments
from trainer.config.compose import compose_command

TRAIN = Path(__file__).parents[3] / "train.py"


@pytest.mark.slow
def test_submitits_tasks_are_the_ranks_of_one_run(tmp_path: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    job = ["experiment=smoke", "data=mock", "logger=none", "baseline=off", "trainer.steps=2", "parallel=tensor2"]
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.sweep.dir=sweep"]
    done = subprocess.run(
        [sys.executable, str(TRAIN), "-m", *job, *launcher],
        cwd=tmp_path,
        env={**alone, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "sweep" / "0" / "result.json").read_text())
    assert (result["status"], result["world_size"], len(result["losses"])) == ("completed", 2, 2)


@pytest.mark.parametrize(("launcher", "processes"), [("torchrun", 2), ("slurm", 8)])
def test_a_launcher_says_how_many_processes_a_job_has(launcher: str, processes: int) -> None:
    sweep = compose_command(parse_arguments(["-m", f"hydra/launcher={launcher}", "trainer.seed=1,2"])).sweep
    assert sweep is not None and sweep.processes == processes
