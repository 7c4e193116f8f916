from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from models.flops import flops_per_token
from models.parameters import parameter_count
from tests.trainer.run.run_recorder import Recorder
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, DataSource, DecayStyle, OptimizerName
from trainer.run import checkpoint
from trainer.run.session import train

MakeConfig = Callable[..., Config]


def test_it_learns_and_tells(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=40, model={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    watcher = Recorder()
    end = train(config, tmp_path, "", watcher)
    assert end.status == "completed" and end.losses == [record.loss for record in watcher.steps]
    # 256 byte values at first; then the corpus' eight letters and the space
    assert end.losses[0] == pytest.approx(5.55, abs=0.1)
    assert end.val_loss is not None and end.val_loss < 2.6
    assert watcher.evaluations == [(40, end.val_loss)]
    info = watcher.info
    assert info is not None
    assert info.parameters == parameter_count(config.model, 256)
    assert info.flops_per_token == flops_per_token(config.model, 256, 16).total
    assert (info.tokens_per_step, info.first_step, info.world_size, list(info.earlier_losses)) == (4 * 16, 1, 1, [])
    assert info.device_name and {"python", "torch", "megatron-core"} <= info.versions.keys()
    record = watcher.steps[-1]
    assert record.optimizer_s > 0 and record.forward_s + record.backward_s + record.optimizer_s < record.step_s
    assert record.memory.peak_saved_bytes > 0 and record.memory.rss_bytes > 10_000_000
    assert record.grad_norm is not None and record.grad_norm > 0


def test_the_schedule_counts_steps(make_config: MakeConfig, tmp_path: Path) -> None:
    watcher = Recorder()
    train(make_config(steps=6, global_batch_size=8, optim={"lr": 1.0, "warmup_steps": 2}), tmp_path, "", watcher)
    rates = [record.lr for record in watcher.steps]
    # warm-up from 0 in two steps, then half a cosine over the other four
    assert rates == pytest.approx([0, 0.5, 1.0, 0.853553, 0.5, 0.146447], abs=1e-5)


def test_the_warm_up_is_a_fifth_of_the_schedule_unless_told(make_config: MakeConfig, tmp_path: Path) -> None:
    def rates(folder: str, warmup_steps: int | None) -> list[float]:
        watcher = Recorder()
        optim = {"lr": 1.0, "warmup_steps": warmup_steps, "decay_style": DecayStyle.constant}
        train(make_config(steps=3, schedule_steps=10, eval_batches=0, optim=optim), tmp_path / folder, "", watcher)
        return [record.lr for record in watcher.steps]

    assert rates("a", None) == [0.0, 0.5, 1.0]
    assert rates("b", 0) == [1.0, 1.0, 1.0]


def test_micro_batches_make_the_same_step(make_config: MakeConfig, tmp_path: Path) -> None:
    plain = {"steps": 3, "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0}}
    whole = train(make_config(micro_batch_size=8, **plain), tmp_path / "a", "", Recorder())
    parts = train(make_config(micro_batch_size=2, global_batch_size=8, **plain), tmp_path / "b", "", Recorder())
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert parts.losses[2] != pytest.approx(whole.losses[0], rel=1e-3)


def test_runs_follow_each_other_and_repeat_to_the_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    ends = []
    for number in range(2):
        random.random(), np.random.rand(), torch.rand(1)
        ends.append(train(make_config(steps=3), tmp_path / str(number), "", Recorder()))
        assert not dist.is_initialized() and not parallel_state.model_parallel_is_initialized()
    assert ends[0] == ends[1]
    assert train(make_config(steps=3, seed=5), tmp_path / "c", "", Recorder()).losses != ends[0].losses


def test_evaluating_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    never = train(make_config(steps=5, eval_batches=0), tmp_path / "a", "", Recorder())
    watcher = Recorder()
    often = train(make_config(steps=5, eval_every=1), tmp_path / "b", "", watcher)
    assert often.losses == never.losses
    assert [step for step, _ in watcher.evaluations] == [1, 2, 3, 4, 5]
    # the same samples: only the weights differ
    assert len({loss for _, loss in watcher.evaluations}) == 5


def test_sgd_without_clipping(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=3, checkpoint_every=3, optim={"name": OptimizerName.sgd, "lr": 0.1, "clip_grad": 0.0})
    assert train(config, tmp_path, "", Recorder()).losses[2] < 5.6


def test_a_diverging_run_stops(make_config: MakeConfig, tmp_path: Path) -> None:
    watcher = Recorder()
    config = make_config(steps=50, checkpoint_every=1, optim={"name": OptimizerName.sgd, "lr": 1e30, "clip_grad": 0.0})
    end = train(config, tmp_path, "", watcher)
    assert end.status == "diverged" and end.step < 50
    assert end.message.startswith(f"step {end.step}: the ")
    # what was saved before is whole and good
    newest = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None and checkpoint.read_progress(newest).step == end.step - 1
    assert [event.status for event in watcher.ends] == ["diverged"]


def test_a_failure_is_told_and_leaves_the_process_clean(make_config: MakeConfig, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise RuntimeError("out of luck")

    watcher = Recorder(on_step=fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(make_config(), tmp_path, "", watcher)
    assert [(event.status, event.message) for event in watcher.ends] == [("failed", "RuntimeError: out of luck")]
    assert not dist.is_initialized()


def test_a_vocabulary_too_small_for_the_data(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size: 100 is less than the 256 token ids of the data"):
        train(make_config(model={"vocab_size": 100}), tmp_path, "", Recorder())
    watcher = Recorder()
    config = make_config(steps=3, eval_batches=0, model={"vocab_size": 300}, data={"source": DataSource.mock})
    train(config, tmp_path, "", watcher)
    assert watcher.info is not None and watcher.info.parameters == parameter_count(config.model, 384)
