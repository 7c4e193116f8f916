"""The jobs of a sweep, read from its folder and set beside each other. Imports no torch.

Works for every launcher: a job's folder holds Hydra's record of its overrides and, if the job got so far, result.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.report.records import PRUNED, RESULT, read_result

#: where Hydra writes, below a job's folder, what the job was told
OVERRIDES = Path(".hydra") / "overrides.yaml"
_NAME_KEY = "logger.name"


@dataclass(frozen=True)
class Job:
    """What one job was told and what it came to."""

    #: its folder in the sweep's, with Hydra's defaults its number
    number: str
    overrides: tuple[str, ...]
    #: result.json; empty if there is none
    result: Mapping[str, Any]

    @property
    def name(self) -> str | None:
        """logger.name, if the job was given one."""
        return next((text.partition("=")[2] for text in self.overrides if text.startswith(f"{_NAME_KEY}=")), None)

    @property
    def status(self) -> str:
        return str(self.result.get("status", "no result"))

    @property
    def message(self) -> str:
        return str(self.result.get("message", ""))

    @property
    def failure(self) -> str:
        """How it ended and why, for a job that did not complete."""
        return f"{self.status}: {self.message}".rstrip(": ")

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def step_s(self) -> float | None:
        return self.result.get("step_s")

    @property
    def token_s(self) -> float | None:
        """Seconds a token: comparable also where batches differ."""
        tokens = self.result.get("tokens_per_step")
        return self.step_s / tokens if self.step_s is not None and tokens else None

    @property
    def peak_bytes(self) -> int | None:
        """Of the device's allocator; on a CPU, of what was saved for backward."""
        allocated = self.result.get("peak_allocated_bytes")
        return self.result.get("peak_saved_bytes") if allocated is None else allocated

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended for want of memory: torch's error, Python's, or Linux's killer."""
        signs = ("outofmemory", "out of memory", "memoryerror", "sigkill")
        return not self.completed and any(sign in self.message.lower() for sign in signs)

    def value_of(self, objective: str) -> float | None:
        """What a sweeper minimises, by the name that the configuration's `objective` has for it."""
        values = {"val_loss": self.result.get("val_loss"), "token_s": self.token_s, "peak_bytes": self.peak_bytes}
        return values[objective]

    @property
    def keeps_all(self) -> bool:
        """Whether it ran our engine and neither recomputed nor offloaded anything."""
        moved = (self.result.get("offloaded_bytes"), self.result.get("recomputed_bytes"))
        return self.completed and self.result.get("engine") == "stash" and moved == (0, 0)


@dataclass(frozen=True)
class Row:
    """A job beside the others of its sweep."""

    job: Job
    #: what sets it apart: its name, or the overrides that not all jobs have
    label: str
    #: the same in few letters
    short_label: str
    is_baseline: bool
    #: time a token and peak over the baseline's, minus 1
    step_change: float | None
    peak_change: float | None
    #: to the last bit those of the baseline
    losses_equal: bool | None
    #: no other job is at least as good in time and peak and better in one of them
    on_front: bool


def job_folders(folder: Path) -> list[Path]:
    """The jobs' folders in a sweep's, in the order of their numbers."""
    found = [path for path in folder.glob("*") if (path / RESULT).is_file() or (path / OVERRIDES).is_file()]
    return sorted(found, key=lambda path: _natural(path.name))


def read_job(folder: Path) -> Job:
    told = folder / OVERRIDES
    overrides = yaml.safe_load(told.read_text()) if told.is_file() else None
    return Job(folder.name, tuple(map(str, overrides or ())), read_result(folder))


def read_jobs(sweep: Path) -> list[Job]:
    return [read_job(folder) for folder in job_folders(sweep)]


def common_overrides(jobs: Sequence[Job]) -> list[str]:
    """What all jobs were told alike."""
    return [text for text in jobs[0].overrides if all(text in job.overrides for job in jobs)] if jobs else []


def own_overrides(job: Job, common: Sequence[str]) -> list[str]:
    """What not all jobs were told; its name is no setting."""
    return [text for text in job.overrides if text not in common and not text.startswith(f"{_NAME_KEY}=")]


def compare(jobs: Sequence[Job]) -> list[Row]:
    """Each job against the baseline: the first that keeps everything, else the first that completed."""
    common = common_overrides(jobs) if len(jobs) > 1 else []
    baseline = next((job for job in jobs if job.keeps_all), None) or next((job for job in jobs if job.completed), None)
    front = pareto({job.number: (job.token_s, job.peak_bytes) for job in jobs if job.completed})
    alike = {job.name: common_overrides([other for other in jobs if other.name == job.name]) for job in jobs}
    return [
        _row(job, own_overrides(job, alike[job.name] if job.name else common), baseline, job.number in front)
        for job in jobs
    ]


def failures(rows: Iterable[Row]) -> list[Row]:
    """Those that should have completed: a search counts on pruned ones, unless none was left."""
    rows = list(rows)
    one_completed = any(row.job.completed for row in rows)
    return [row for row in rows if not row.job.completed and not (one_completed and row.job.status == PRUNED)]


def _row(job: Job, own: Sequence[str], baseline: Job | None, on_front: bool) -> Row:
    step_change = peak_change = losses_equal = None
    named = [job.name] if job.name else []
    if baseline is not None and job.completed:
        step_change = _change(job.token_s, baseline.token_s)
        peak_change = _change(job.peak_bytes, baseline.peak_bytes)
        losses_equal = job.result.get("losses") == baseline.result.get("losses")
    return Row(
        job=job,
        label=" ".join([*named, *own]) or job.number,
        short_label=" + ".join([*named, *map(_short, own)]) or job.number,
        is_baseline=job is baseline,
        step_change=step_change,
        peak_change=peak_change,
        losses_equal=losses_equal,
        on_front=on_front,
    )


def pareto(points: Mapping[str, tuple[float | None, float | None]]) -> set[str]:
    """Names of the points that no other one dominates, less being better; equal points do not dominate each other."""
    known = {name: (a, b) for name, (a, b) in points.items() if a is not None and b is not None}
    return {
        name
        for name, (a, b) in known.items()
        if not any(c <= a and d <= b and (c, d) != (a, b) for c, d in known.values())
    }


def _change(value: float | None, base: float | None) -> float | None:
    return value / base - 1 if value is not None and base else None


def _short(override: str) -> str:
    """recompute=full -> full; trainer.micro_batch_size=4 -> micro_batch_size=4."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}" if "." in key else value


def _natural(text: str) -> list[Any]:
    """2 before 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
