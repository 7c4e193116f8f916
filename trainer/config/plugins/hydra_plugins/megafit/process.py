"""hydra/launcher=process: each job of a sweep in processes of its own, on this machine, one job after the other.

So no job finds what another left: a warm CUDA allocator, Megatron's globals, a broken process group.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import psutil
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer.config.errors import BAD_INPUT, RunFailed
from trainer.config.overrides import quoted
from trainer.config.search_path import CONF, TEAM_PROVIDER
from trainer.report.records import RESULT, read_result, write_failure
from trainer.report.sweep import OVERRIDES, Job, compare, read_job
from trainer.report.units import bytes_text, milliseconds_text

log = logging.getLogger(__name__)

#: what a job prints, in its folder
LOG = "launch.log"
#: what a job that is told to end gets to finish its step and to save
GRACE_S = 60.0


# annotations must be types, not texts: Hydra runs this module before Python can look it up by name
@dataclass
class ProcessLauncherConf:
    _target_: str = "hydra_plugins.megafit.process.ProcessLauncher"
    #: processes of each job, started by torch.distributed.run if there are several
    nproc_per_node: int = 1
    #: a job that takes longer is ended and counts as failed
    timeout_s: Optional[float] = None
    #: start no job after one that failed
    fail_fast: bool = False
    #: leave alone what an earlier sweep in this folder completed, and go on with what was interrupted
    resume: bool = False
    #: refuse the sweep if one of its jobs can't run; false: that job fails when its turn comes
    check_first: bool = True


ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConf, provider="megafit")


class ProcessLauncher(Launcher):
    def __init__(self, **settings: Any) -> None:
        self._settings = ProcessLauncherConf(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs. One that fails is returned as such, its reason in its result.json."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        if initial_job_idx == 0:
            log.info("jobs in %s; each prints to %s in its folder", self._sweep, LOG)
        told = [Job(str(number), tuple(filter_overrides(job)), {}) for number, job in enumerate(job_overrides)]
        returns: list[JobReturn] = []
        with _unwound_by_sigterm():
            for number, (overrides, row) in enumerate(zip(job_overrides, compare(told), strict=True), initial_job_idx):
                returns.append(self._run(number, overrides, row.label))
                if self._settings.fail_fast and returns[-1].status is JobStatus.FAILED:
                    break
        return returns

    @property
    def _sweep(self) -> Path:
        return Path(self._config.hydra.sweep.dir).absolute()

    def _run(self, number: int, overrides: Sequence[str], label: str) -> JobReturn:
        config = self._loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        folder = self._sweep / str(config.hydra.sweep.subdir)
        told = tuple(config.hydra.overrides.task)
        job = read_job(folder)
        again = self._settings.resume and job.overrides == told
        if again and job.completed:
            log.info("#%d  %s: completed earlier", number, label)
        else:
            has_checkpoint = again and any((folder / "checkpoints").glob("step_*"))
            self._run_processes(config, folder, [f"resume={quoted(folder)}"] if has_checkpoint else [])
            job = read_job(folder)
            spent = f"{milliseconds_text(job.step_s)} a step, peak {bytes_text(job.peak_bytes)}"
            log.info("#%d  %s: %s", number, label, f"completed, {spent}" if job.completed else job.failure)
        return job_return(job, folder, config.objective.name)

    def _run_processes(self, config: DictConfig, folder: Path, resume: list[str]) -> None:
        """One job from beginning to end; whatever comes, result.json and Hydra's record of the overrides are there."""
        told = list(config.hydra.overrides.task)
        (folder / OVERRIDES).parent.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).unlink(missing_ok=True)
        command = [
            *self._program(),
            *("--config-name", config.hydra.job.config_name),
            *(f"--config-dir={s.path}" for s in config.hydra.runtime.config_sources if s.provider == TEAM_PROVIDER),
            *config.hydra.overrides.hydra,
            *told,
            *resume,
            "hydra.mode=RUN",
            f"hydra.run.dir={quoted(folder)}",
            # from these the run learns that it belongs to a sweep
            f"hydra.sweep.dir={quoted(self._sweep)}",
            f"hydra.job.num={config.hydra.job.num}",
        ]
        try:
            failure = _failure(command, folder / LOG, config.hydra.job.env_set, self._settings.timeout_s)
        finally:
            # the run's own record of them has those of this launcher too
            OmegaConf.save(OmegaConf.create(told), folder / OVERRIDES)
        if failure and read_result(folder).get("status") in (None, "completed", "interrupted"):
            write_failure(folder, *failure)

    def _program(self) -> list[str]:
        script, processes = str(CONF.parent / "train.py"), self._settings.nproc_per_node
        if processes == 1:
            return [sys.executable, script]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        return [*torchrun, "--standalone", f"--nproc-per-node={processes}", script]


class _Failed(JobReturn):
    @JobReturn.return_value.getter  # type: ignore[attr-defined, untyped-decorator]
    def return_value(self) -> Any:
        """Raises the failure, as JobReturn does, but leaves it to the report to tell it."""
        raise self._return_value


def job_return(job: Job, folder: Path, objective: str) -> JobReturn:
    """What sweepers are told: what they minimise, as train.py returns it, or that the job failed."""
    done = (JobReturn if job.completed else _Failed)(job.overrides, working_dir=str(folder), task_name="train")
    done.status = JobStatus.COMPLETED if job.completed else JobStatus.FAILED
    done.return_value = job.value_of(objective) if job.completed else RunFailed(f"job {job.number} {job.failure}")
    return done


def _failure(
    command: list[str], output: Path, environment: Mapping[str, str], timeout_s: float | None
) -> tuple[str, str] | None:
    """Run a command to its end, printing into a file. Returns status and reason if it failed."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return "failed", f"ended after hydra.launcher.timeout_s={timeout_s:g}"
        except BaseException:
            _end(process)
            raise
    if code == 0:
        return None if (output.parent / RESULT).is_file() else ("failed", "ended without a result")
    lines = output.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "refused" if code == BAD_INPUT else "failed", "; ".join(errors) or f"{how}: {last}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job and all its processes (torchrun's lead sessions of their own): asked first, then killed."""
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        log.warning("the job did not end within %g s: killed", GRACE_S)
    finally:
        process.kill()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        # so that the next job finds their memory free
        psutil.wait_procs(family, timeout=5)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the job in hand as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
