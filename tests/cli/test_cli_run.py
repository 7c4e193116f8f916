"""Real runs by the command line: exit codes and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "train.py"
Cli = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow
SMOKE = ["experiment=smoke", "trainer.steps=2", "logger=none", "data=mock"]


def status(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["status"])


def test_a_run_that_completes_exits_0(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SMOKE, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "run") == "completed"
    assert (tmp_path / "run" / "train.log").is_file()


def test_a_run_that_diverges_exits_1_without_a_traceback(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SMOKE, "hydra.run.dir=run", "optim=sgd", "optim.lr=1e30", "optim.clip_grad=0")
    assert done.returncode == 1
    assert status(tmp_path / "run") == "diverged"
    assert "error: the run diverged; " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_processes_of_torchrun_share_one_folder(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(TRAIN), *SMOKE, "parallel=tensor2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    assert status(folder) == "completed"
