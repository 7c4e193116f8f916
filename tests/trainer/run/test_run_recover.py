"""Out of memory in a step: the run goes on with a thriftier plan, and nobody can tell from its losses."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memory.engine.ledger import Ledger
from tests.trainer.run.run_recorder import Recorder
from trainer.config.schema import Config, PlanConfig, PlanSource
from trainer.estimate import auto_ladder
from trainer.plan import make_seed
from trainer.run import checkpoint
from trainer.run.recover import MemoryExhausted
from trainer.run.session import train

MakeConfig = Callable[..., Config]
AUTO = PlanConfig(source=PlanSource.auto, budget="1GiB")


class _Limit:
    """A device on which no more than so many bytes can be held for backward."""

    def __init__(self, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        grow = Ledger.grow

        def limited(ledger: Ledger, more: int) -> None:
            if ledger.held_bytes + more > nbytes:
                self.failures += 1
                raise torch.OutOfMemoryError(f"artificial: {nbytes} bytes")
            grow(ledger, more)

        monkeypatch.setattr(Ledger, "grow", limited)


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(steps=5, plan=AUTO, model={"num_layers": 4})


def _held_bytes(config: Config, folder: Path) -> tuple[list[float], int]:
    watcher = Recorder()
    end = train(config, folder, "", watcher)
    return end.losses, max(record.memory.peak_saved_bytes for record in watcher.steps)


def test_losses_are_those_of_the_low_rung_from_the_start(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    losses, held = _held_bytes(config, tmp_path / "roomy")
    ladder = auto_ladder(config, False, make_seed(config, False).plan)
    assert ladder.current.plan.idle and len(ladder.rungs) > 2
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        limit = _Limit(int(0.8 * held), patch)
        tight, tight_held = _held_bytes(config, tmp_path / "tight")
    assert 0 < limit.failures < len(ladder.rungs)
    assert tight_held <= 0.8 * held
    assert tight == losses
    messages = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(messages) == limit.failures and "the same batch again on rung 1" in messages[0]
    written = tmp_path / "tight" / f"plan-rung-{limit.failures}.yaml"
    low = replace(config, plan=PlanConfig(source=PlanSource.file, path=str(written)))
    from_the_start, low_held = _held_bytes(low, tmp_path / "low")
    assert from_the_start == tight and low_held <= 0.8 * held


def test_memory_that_runs_out_in_mid_run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, held = _held_bytes(config, tmp_path / "roomy")
    limits: list[_Limit] = []
    watcher = Recorder(lambda step: limits.append(_Limit(int(0.8 * held), monkeypatch)) if step == 2 else None)
    end = train(config, tmp_path / "shrinks", "", watcher)
    assert end.losses == losses and limits[0].failures > 0
    assert max(r.memory.peak_saved_bytes for r in watcher.steps[2:]) <= 0.8 * held
    assert watcher.steps[1].memory.peak_saved_bytes == held


def test_below_the_lowest_rung_it_stops_with_a_checkpoint(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs = len(auto_ladder(config, False, make_seed(config, False).plan).rungs)
    limits: list[_Limit] = []
    watcher = Recorder(lambda step: limits.append(_Limit(1000, monkeypatch)) if step == 3 else None)
    with pytest.raises(MemoryExhausted, match="thriftiest plan"):
        train(config, tmp_path, "", watcher)
    assert limits[0].failures == rungs
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None and checkpoint.read_progress(found).step == 3


def test_another_source_of_the_plan_fails_as_before(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Limit(1000, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        train(make_config(steps=3), tmp_path, "", Recorder())


def test_a_run_leaves_its_estimate(config: Config, tmp_path: Path) -> None:
    train(replace(config, trainer=replace(config.trainer, steps=3)), tmp_path, "", Recorder())
    found = json.loads((tmp_path / "estimate.json").read_text())
    assert found["peak_bytes"] > 0 and found["plan"]["num_layers"] == 4


@pytest.mark.slow
def test_all_ranks_step_down_when_one_runs_out(make_config: MakeConfig, tmp_path: Path) -> None:
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps(make_config(steps=3, plan=AUTO, eval_batches=0)))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = str(Path(__file__).with_name("recover_worker.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    subprocess.run([*command, worker, str(job)], cwd=root, env=environment, check=True, timeout=200)
    for rank in range(2):
        roomy, tight = pickle.loads(job.with_suffix(f".{rank}").read_bytes())
        assert tight[0] == roomy[0]
        assert tight[1] <= 0.8 * roomy[1]
