"""What a run is held against: the same training with everything kept. Imports no torch.

A baseline is measured in the run itself, estimated from steps that kept only some layers, or an earlier run's, which
counts only where its fingerprint is this run's.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memory.plan import Plan

BASELINE = "baseline.json"

#: steps left out of medians: allocators, caches and just-in-time compilers settle there
WARM_UP_STEPS = 3

Source = Literal["measured", "estimated", "file"]
#: what a step ran under: everything kept, some layers kept, or the plan that was asked for
Under = Literal["keep", "probe", "plan"]


@dataclass(frozen=True)
class Figures:
    """Medians and peaks of several steps under one plan, on the reporting rank."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_saved_bytes: int
    #: None on a CPU
    peak_allocated_bytes: int | None


@dataclass(frozen=True)
class Baseline:
    source: Source
    figures: Figures


@dataclass(frozen=True)
class Choice:
    """Where a run's baseline comes from: decided before the first step."""

    #: for a person
    note: str
    #: what the first `steps` steps run under; None: the plan itself
    lead_in: Plan | None = None
    steps: int = 0
    #: the layers that the plan acts on over those of them that lead_in keeps; 1: all are kept
    scale: float = 1.0
    #: an earlier run's
    stored: Baseline | None = None
    #: the plan keeps everything: the run is a baseline for others
    is_baseline: bool = False

    @property
    def under(self) -> Under:
        """What the steps of lead_in are."""
        return "keep" if self.scale == 1 else "probe"


@dataclass(frozen=True)
class Delta:
    """A plan's figures over its baseline's: shares of the baseline's, more than 0 where the plan has more."""

    step: float
    forward: float
    backward: float
    #: share of the baseline's MFU that is lost
    mfu_drop: float
    peak_saved: float
    #: bytes that the plan's peak is lower by
    peak_saved_bytes: int
    peak_allocated: float | None
    peak_allocated_bytes: int | None


def settled_median(values: Sequence[float]) -> float:
    """Without the warm-up; of the last value where there is nothing else."""
    return statistics.median(values[min(WARM_UP_STEPS, len(values) - 1) :])


def estimated(partial: Figures, plan: Figures, scale: float) -> Figures:
    """What keeping everything would give, of steps that kept 1/scale of the layers the plan acts on.

    Linear in the number of layers, which peaks are and times nearly.
    """

    def beyond(kept_some: float, kept_none: float) -> float:
        return kept_none + (kept_some - kept_none) * scale

    allocated = None
    if partial.peak_allocated_bytes is not None and plan.peak_allocated_bytes is not None:
        allocated = round(beyond(partial.peak_allocated_bytes, plan.peak_allocated_bytes))
    return Figures(
        beyond(partial.step_s, plan.step_s),
        beyond(partial.forward_s, plan.forward_s),
        beyond(partial.backward_s, plan.backward_s),
        beyond(partial.optimizer_s, plan.optimizer_s),
        round(beyond(partial.peak_saved_bytes, plan.peak_saved_bytes)),
        allocated,
    )


def delta(plan: Figures, baseline: Figures) -> Delta:
    allocated = allocated_bytes = None
    if plan.peak_allocated_bytes is not None and baseline.peak_allocated_bytes is not None:
        allocated = plan.peak_allocated_bytes / baseline.peak_allocated_bytes - 1
        allocated_bytes = baseline.peak_allocated_bytes - plan.peak_allocated_bytes
    return Delta(
        step=plan.step_s / baseline.step_s - 1,
        forward=plan.forward_s / baseline.forward_s - 1,
        backward=plan.backward_s / baseline.backward_s - 1,
        mfu_drop=1 - baseline.step_s / plan.step_s,
        peak_saved=plan.peak_saved_bytes / baseline.peak_saved_bytes - 1,
        peak_saved_bytes=baseline.peak_saved_bytes - plan.peak_saved_bytes,
        peak_allocated=allocated,
        peak_allocated_bytes=allocated_bytes,
    )


def to_json(figures: Figures, fingerprint: Mapping[str, Any]) -> str:
    """The content of baseline.json."""
    return json.dumps({"figures": dataclasses.asdict(figures), "fingerprint": fingerprint}, indent=1) + "\n"


class NoBaseline(ValueError):
    """No stored baseline is this run's; says what differs in the nearest one."""


def find(path: Path, fingerprint: Mapping[str, Any]) -> Baseline:
    """The baseline with this fingerprint in a run's folder or one above it. Raises NoBaseline."""
    stored = [json.loads(file.read_text()) for file in sorted(path.rglob(BASELINE))]
    if not stored:
        raise NoBaseline(f"there is no {BASELINE} in {path}; a run that keeps everything writes one")
    differences = [_differences(entry["fingerprint"], fingerprint) for entry in stored]
    nearest = min(range(len(stored)), key=lambda index: len(differences[index]))
    if differences[nearest]:
        raise NoBaseline(f"the baseline in {path} is of another run: {', '.join(differences[nearest])}")
    return Baseline("file", Figures(**stored[nearest]["figures"]))


def _differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    keys = sorted(stored.keys() | current.keys())
    return [
        f"{key} was {stored.get(key)!r} and is {current.get(key)!r}"
        for key in keys
        if stored.get(key) != current.get(key)
    ]
