from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async

from models import cpu
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, Precision
from trainer.run import checkpoint, state
from trainer.run.checkpoint import Progress
from trainer.run.distributed import world

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module", autouse=True)
def alone(make_config: MakeConfig) -> Iterator[None]:
    if not torch.cuda.is_available():
        cpu.install()
    with world(make_config()):
        yield


def progress(step: int) -> Progress:
    return Progress(
        step,
        4 * step,
        4 * step,
        [0.1 * number for number in range(step)],
        {"model.num_layers": 2},
        {"parallel.tensor": 2},
    )


def tensors(value: float) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((3, 2), value), replica_id=0)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path / "checkpoints", progress(3), "a: 1\n", tensors(1.5), keep=2)
    assert saved == tmp_path / "checkpoints" / "step_00000003" == checkpoint.newest(tmp_path / "checkpoints")
    assert checkpoint.read_progress(saved) == progress(3)
    assert torch.equal(checkpoint.load(saved, tensors(0.0))["weight"], torch.full((3, 2), 1.5))


def test_the_oldest_make_room_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (7, 99_999_999, 100_000_000):
        checkpoint.save(tmp_path, Progress(step, 0, 0, [], {}, {}), "", tensors(step), keep=2)
    assert names(tmp_path) == ["step_100000000", "step_99999999"]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_100000000"


def test_half_written_ones_are_not_seen_and_swept_away(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, progress(1), "", tensors(1), keep=2)
    (tmp_path / ".writing-step_00000002-abc").mkdir()
    (tmp_path / ".writing-step_00000002-abc" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step_00000009.bak").mkdir()
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_00000001"
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step_00000001", "step_00000009.bak"]
    checkpoint.clean(tmp_path / "nowhere")
    assert checkpoint.newest(tmp_path / "nowhere") is None


def test_a_save_that_fails_leaves_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, progress(1), "", tensors(1), keep=1)

    def full(path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, progress(2), "", tensors(2), keep=1)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_00000001"


def test_saving_starts_no_helper_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a manager process was asked for")

    monkeypatch.setattr(filesystem_async.mp, "get_context", _only_fork(refuse))
    before = filesystem_async._results_queue
    checkpoint.save(tmp_path, progress(1), "", tensors(1), keep=1)
    assert filesystem_async._results_queue is before


def _only_fork(refuse: Callable[..., Any]) -> Callable[[str], Any]:
    from torch import multiprocessing

    get_context = multiprocessing.get_context
    return lambda method: get_context(method) if method == "fork" else refuse(method)


def test_saving_a_small_model_takes_about_a_second_at_most(tmp_path: Path) -> None:
    twelve_mb = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3_000_000), replica_id=0)}
    took_s = []
    for step in (1, 2, 3):
        began = time.perf_counter()
        checkpoint.save(tmp_path, progress(step), "", dict(twelve_mb), keep=1)
        took_s.append(time.perf_counter() - began)
    assert min(took_s) < 1.5


def test_a_difference_is_refused_by_name() -> None:
    saved = {"model.num_layers": 2, "model.bias": False, "trainer.seed": 1}
    checkpoint.refuse_if_different(saved, dict(saved))
    checkpoint.refuse_if_different(saved, {"model.num_layers": 2, "model.came_later": 5})
    with pytest.raises(ConfigError) as caught:
        checkpoint.refuse_if_different(saved, {"model.num_layers": 3, "model.bias": False, "trainer.seed": 2})
    assert caught.value.problem == (
        "the checkpoint is of another run: model.num_layers was 2 and is 3, trainer.seed was 1 and is 2"
    )


def test_fingerprint(make_config: MakeConfig) -> None:
    def of(**options: Any) -> dict[str, Any]:
        return state.fingerprint(make_config(**options), world_size=1, vocab_size=256, samples_in_pass=10)

    assert of() == of(
        steps=99, optim={"lr": 1.0}, model={"name": "x", "hidden_dropout": 0.5}, data={"path": "elsewhere"}
    )
    for changed in (
        {"seed": 1},
        {"model": {"bias": True}},
        {"model": {"extras": {"a": [1]}}},
        {"parallel": {"distributed_optimizer": True}},
        {"precision": Precision.bf16},
    ):
        assert of(**changed) != of(), changed
