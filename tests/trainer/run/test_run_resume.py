from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.run.run_recorder import Recorder
from tests.trainer.run.run_worker import Job
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, DecayStyle
from trainer.run import checkpoint
from trainer.run.session import train

MakeConfig = Callable[..., Config]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def whole(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float | None, Path]:
    """Losses, validation loss and folder of a run of 8 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    end = train(make_config(checkpoint_every=8), folder, "", Recorder())
    return end.losses, end.val_loss, folder


def assert_same_to_the_bit(folder: Path, other: Path) -> None:
    """Weights, optimizer and generators of two runs' newest checkpoints, as written, byte for byte."""
    ours, theirs = checkpoint.newest(folder / "checkpoints"), checkpoint.newest(other / "checkpoints")
    assert ours is not None and theirs is not None and ours != theirs
    files = sorted(path.name for path in ours.iterdir() if path.suffix in (".distcp", ".pt"))
    assert files == sorted(path.name for path in theirs.iterdir() if path.suffix in (".distcp", ".pt")) != []
    for name in files:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_a_run_in_two_parts_is_the_whole_run(
    make_config: MakeConfig, whole: tuple[list[float], float | None, Path], tmp_path: Path
) -> None:
    losses, val_loss, whole_folder = whole
    first = train(
        make_config(steps=5, schedule_steps=8, checkpoint_every=2, checkpoint_keep=1),
        tmp_path / "a",
        "x: 1\n",
        Recorder(),
    )
    assert first.status == "completed" and first.losses == losses[:5]
    # steps 2 and 4 made room for the end
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["step_00000005"]
    assert (tmp_path / "a" / "checkpoints" / "step_00000005" / "config_resolved.yaml").read_text() == "x: 1\n"

    watcher = Recorder()
    second = train(make_config(checkpoint_every=8, resume=str(tmp_path / "a")), tmp_path / "b", "", watcher)
    assert second.losses == losses
    assert second.val_loss == val_loss
    assert [record.step for record in watcher.steps] == [6, 7, 8]
    assert watcher.info is not None and watcher.info.first_step == 6 and list(watcher.info.earlier_losses) == losses[:5]
    assert_same_to_the_bit(tmp_path / "b", whole_folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_in_hand(
    make_config: MakeConfig, whole: tuple[list[float], float | None, Path], tmp_path: Path, number: signal.Signals
) -> None:
    losses, _, whole_folder = whole
    before = signal.getsignal(number)
    # the signal comes between step 3 and 4, so 4 is the one that notices
    watcher = Recorder(on_step=lambda step: os.kill(os.getpid(), number) if step == 3 else None)
    end = train(make_config(), tmp_path, "", watcher)
    assert end.status == "interrupted" and end.losses == losses[:4] and end.val_loss is None
    assert [event.status for event in watcher.ends] == ["interrupted"]
    assert signal.getsignal(number) is before
    resumed = train(make_config(resume=str(tmp_path), checkpoint_every=8), tmp_path, "", Recorder())
    assert resumed.losses == losses
    assert_same_to_the_bit(tmp_path, whole_folder)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(
    make_config: MakeConfig, whole: tuple[list[float], float | None, Path], tmp_path: Path
) -> None:
    losses, _, whole_folder = whole
    folder, marker = tmp_path / "run", tmp_path / "saving"
    (tmp_path / "jobs").write_bytes(pickle.dumps([Job(make_config(checkpoint_every=3), folder)]))
    # the second save, at step 6, stops between its last byte and its name
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE / "run_worker.py"), str(tmp_path / "jobs"), str(marker)],
        cwd=HERE.parents[2],
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marker.exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (draft,) = [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    assert any(draft.glob("*.distcp"))

    resumed = train(make_config(checkpoint_every=8, resume=str(folder)), folder, "", Recorder())
    assert resumed.losses == losses
    assert not draft.exists()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000003", "step_00000008"]
    assert_same_to_the_bit(folder, whole_folder)


def test_another_model_is_refused_by_what_differs(
    make_config: MakeConfig, whole: tuple[list[float], float | None, Path], tmp_path: Path
) -> None:
    resume = str(whole[2])
    with pytest.raises(ConfigError) as caught:
        train(make_config(steps=9, model={"hidden_size": 64, "num_layers": 3}, resume=resume), tmp_path, "", Recorder())
    assert caught.value.key == "resume"
    assert "model.hidden_size was 32 and is 64, model.num_layers was 2 and is 3" in caught.value.problem
    assert "ffn" not in caught.value.problem


def test_resume_without_anything_to_resume(
    make_config: MakeConfig, whole: tuple[list[float], float | None, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"resume: there is no whole checkpoint in"):
        train(make_config(resume=str(tmp_path)), tmp_path, "", Recorder())
    with pytest.raises(ConfigError, match=r"trainer.steps: the checkpoint already stands at step 8 of 8"):
        train(make_config(resume=str(whole[2])), tmp_path, "", Recorder())
    # a fresh run would thin out the old one's checkpoints among its own
    with pytest.raises(ConfigError, match=r"hydra.run.dir: .* holds checkpoints of an earlier run"):
        train(make_config(), whole[2], "", Recorder())


def test_settings_of_the_optimizer_are_the_new_runs(
    make_config: MakeConfig, whole: tuple[list[float], float | None, Path], tmp_path: Path
) -> None:
    config = make_config(steps=10, resume=str(whole[2]), optim={"lr": 1e-4, "decay_style": DecayStyle.constant})
    watcher = Recorder()
    train(config, tmp_path, "", watcher)
    assert [record.lr for record in watcher.steps] == [1e-4, 1e-4]
