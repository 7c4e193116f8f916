"""Two processes of train.py: one of them killed, both asked to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow
TRAIN = Path(__file__).parents[3] / "train.py"
OPTIONS = ["experiment=smoke", "data=mock", "logger=none", "parallel=tensor2", "trainer.steps=1000000", "baseline=off"]


def signalled(folder: Path, number: signal.Signals, count: int) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and result of a run whose last `count` ranks get a signal once steps are being made."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with subprocess.Popen(
        [*torchrun, str(TRAIN), *OPTIONS, "hydra.run.dir=run"],
        cwd=folder,
        env={**alone, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        metrics, patience_s = folder / "run" / "metrics.jsonl", time.monotonic() + 200
        while not (metrics.is_file() and metrics.stat().st_size):
            assert time.monotonic() < patience_s and running.poll() is None
            time.sleep(0.05)
        ranks = sorted(psutil.Process(running.pid).children(), key=lambda process: process.environ()["RANK"])
        assert [process.environ()["RANK"] for process in ranks] == ["0", "1"]
        for process in ranks[-count:]:
            process.send_signal(number)
        said, _ = running.communicate(timeout=60)
    assert not any(process.is_running() for process in ranks)
    return running.returncode, said, json.loads((folder / "run" / "result.json").read_text())


def test_a_killed_rank_stops_the_other_which_names_it(tmp_path: Path) -> None:
    code, said, result = signalled(tmp_path, signal.SIGKILL, 1)
    assert code == 1
    assert "error: rank 1 died or hangs: no sign of life for" in said
    assert result["status"] == "failed" and result["message"].startswith("rank 1 died or hangs")


def test_ranks_asked_to_stop_write_one_checkpoint_and_are_done(tmp_path: Path) -> None:
    code, said, result = signalled(tmp_path, signal.SIGTERM, 2)
    assert code == 0, said
    assert result["status"] == "interrupted"
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{result['steps']:08d}"
