"""Two processes over gloo, all their runs in one launch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.run.run_recorder import Recorder
from tests.trainer.run.run_worker import Job
from trainer.config.schema import Config
from trainer.run import checkpoint
from trainer.run.loop import RunResult
from trainer.run.session import train

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parents[3]
#: of a loss, to that of one process: sums over ranks come in another order
TOLERANCE = 1e-6
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LAYOUTS = {
    "dp": {},
    "distributed_optimizer": {"distributed_optimizer": True},
    "tp": {"tensor": 2},
    "pp": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2, "overlap_p2p_comm": True},
}


@dataclass(frozen=True)
class Launch:
    folder: Path
    #: results by job, on each of the two ranks
    ends: dict[str, list[RunResult]]


@pytest.fixture(scope="module")
def one_process(make_config: MakeConfig) -> MakeConfig:
    """Configurations of one process's run of 8 steps without dropout, or a part of it (steps, resume)."""

    def make(**options: Any) -> Config:
        shape = {"model": {**NO_DROPOUT, "num_layers": 4}, "global_batch_size": 16, "checkpoint_every": 8}
        return make_config(**{**shape, "steps": 8, "schedule_steps": 8, **options})

    return make


@pytest.fixture(scope="module")
def launch(make_config: MakeConfig, one_process: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Each layout: a whole run; the same run stopped by a signal to rank 1 alone, and gone on with; the middle of a
    run that one process began."""
    folder = tmp_path_factory.mktemp("parallel")
    jobs: dict[str, Job] = {}
    for sharded in (False, True):
        begun = one_process(steps=3, parallel={"distributed_optimizer": sharded})
        train(begun, folder / f"begun {sharded}", "", Recorder())
    for name, parallel in LAYOUTS.items():
        model = {"num_layers": 4} if name == "interleaved" else {}
        shape = {"parallel": parallel, "model": model, "global_batch_size": 16, "checkpoint_every": 6, "steps": 6}
        jobs[name] = Job(make_config(**shape), folder / name)
        jobs[f"{name} stopped"] = Job(make_config(**shape), folder / f"{name}2", terminated=(1, 2))
        jobs[f"{name} resumed"] = Job(make_config(**shape, resume=str(folder / f"{name}2")), folder / f"{name}2")
        begun_in = folder / f"begun {name == 'distributed_optimizer'}"
        middle = one_process(steps=6, parallel=parallel, resume=str(begun_in))
        jobs[f"{name} in the middle"] = Job(middle, folder / f"{name}3")
    (folder / "jobs").write_bytes(pickle.dumps(list(jobs.values())))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = str(Path(__file__).with_name("run_worker.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, worker, str(folder / "jobs")], cwd=ROOT, env=environment, check=True, timeout=500)
    results = [pickle.loads((folder / f"jobs.{rank}").read_bytes()) for rank in range(2)]
    return Launch(folder, {name: [ends[index] for ends in results] for index, name in enumerate(jobs)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_and_both_ranks_know(launch: Launch, layout: str) -> None:
    ours, theirs = launch.ends[layout]
    assert ours == theirs and ours.status == "completed"
    assert ours.losses[-1] < ours.losses[0] - 0.1
    assert ours.val_loss is not None and ours.val_loss < ours.losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_to_one_rank_stops_both_and_the_rest_is_the_same_to_the_bit(launch: Launch, layout: str) -> None:
    (whole, _), (stopped, theirs), (resumed, _) = (
        launch.ends[f"{layout}{part}"] for part in ("", " stopped", " resumed")
    )
    assert stopped == theirs and (stopped.status, stopped.step) == ("interrupted", 3)
    assert resumed.losses == whole.losses and resumed.val_loss == whole.val_loss
    saved = [checkpoint.newest(launch.folder / name / "checkpoints") for name in (layout, f"{layout}2")]
    assert saved[0] is not None and saved[1] is not None
    files = sorted(path.name for path in saved[0].glob("*.distcp"))
    assert len(files) == 2
    for name in files:
        assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes(), name


@pytest.fixture(scope="module")
def alone(one_process: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """One process's run of 8 steps."""
    return train(one_process(), tmp_path_factory.mktemp("alone"), "", Recorder())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_may_change_its_layout_and_change_back(
    launch: Launch, one_process: MakeConfig, alone: RunResult, layout: str, tmp_path: Path
) -> None:
    """Steps 1 to 3 and 7 to 8 on one process, the middle on two: the loss curve of one process, but for the order of
    sums over ranks."""
    middle, _ = launch.ends[f"{layout} in the middle"]
    assert middle.status == "completed" and middle.losses == pytest.approx(alone.losses[:6], rel=TOLERANCE)
    parallel = {"distributed_optimizer": layout == "distributed_optimizer"}
    end = train(one_process(parallel=parallel, resume=str(launch.folder / f"{layout}3")), tmp_path, "", Recorder())
    assert end.losses[:6] == middle.losses
    assert end.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    assert end.val_loss == pytest.approx(alone.val_loss, rel=TOLERANCE)
