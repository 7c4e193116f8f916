"""How the launcher runs one job's processes; whole sweeps are in tests/cli/test_cli_sweep.py."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher

from trainer.config.errors import RunFailed
from trainer.report.sweep import Job


@pytest.fixture
def process() -> Any:
    """The launcher's module, as Hydra imported it."""
    launchers = Plugins.instance().discover(Launcher)
    (ours,) = [launcher for launcher in launchers if launcher.__name__ == "ProcessLauncher"]
    return sys.modules[ours.__module__]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "launch.log"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_job_that_did_its_work_has_no_failure(process: Any, output: Path) -> None:
    (output.parent / "result.json").touch()
    assert process._failure(python("import os; print(os.environ['NAME'])"), output, {"NAME": "value"}, None) is None
    assert output.read_text() == "value\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('error: a: b. c'); print('error: d: e. f', file=sys.stderr); sys.exit(2)", None),
        ("print('all is well')", "ended without a result"),
        ("raise MemoryError('too much')", "exit code 1: MemoryError: too much"),
        ("import sys; sys.exit(3)", "exit code 3: it printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL: it printed nothing"),
    ],
)
def test_a_failure_is_told_in_the_jobs_own_words(process: Any, output: Path, code: str, said: str | None) -> None:
    status, told = process._failure(python(code), output, {}, None)
    if said is None:
        assert (status, sorted(told.split("; "))) == ("refused", ["a: b. c", "d: e. f"])
    else:
        assert (status, told) == ("failed", said)


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[list[str]]:
    """A job that ignores SIGTERM, with a process of its own session, as torchrun starts them; writes that one's id."""
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open({str(tmp_path / "inner")!r}, "w").write(str(inner.pid))
time.sleep(60)
"""
    yield python(code)
    psutil.wait_procs([psutil.Process(pid) for pid in [_inner(tmp_path)] if psutil.pid_exists(pid)], timeout=5)


def _inner(folder: Path) -> int:
    return int((folder / "inner").read_text())


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_job_that_takes_too_long_ends_with_all_its_processes(
    process: Any, output: Path, stubborn: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    assert process._failure(stubborn, output, {}, 5) == ("failed", "ended after hydra.launcher.timeout_s=5")
    assert _gone(_inner(tmp_path))


def test_ctrl_c_ends_the_job(process: Any, output: Path, stubborn: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        with pytest.raises(KeyboardInterrupt):
            process._failure(stubborn, output, {}, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _gone(_inner(tmp_path))


def test_sigterm_unwinds_and_the_old_handler_comes_back(process: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, process._unwound_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_sweepers_are_told_the_validation_loss_or_the_failure(process: Any, tmp_path: Path) -> None:
    done = process.job_return(Job("0", ("a=1",), {"status": "completed", "val_loss": 1.25}), tmp_path, "val_loss")
    assert (done.status.name, done.return_value, done.overrides) == ("COMPLETED", 1.25, ("a=1",))
    failed = process.job_return(Job("1", (), {"status": "diverged", "message": "loss is nan"}), tmp_path, "val_loss")
    assert failed.status.name == "FAILED"
    with pytest.raises(RunFailed, match="job 1 diverged: loss is nan"):
        _ = failed.return_value
