"""What a run tells whoever watches it. Imports no torch.

The run calls, in this order: `run_started` once; then for each step `step_done`, with `effects` once after the first
of them under the plan, `interval` every so many steps, with `advised` where a threshold was passed, and `evaluated`
after each evaluation; `run_ended` once, also when the run failed. Every rank may call: whether anything is written is
the observer's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from memory.plan import Plan
from trainer.config.schema import Config
from trainer.report.baseline import Choice, Delta, Under

Status = Literal["completed", "interrupted", "diverged", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """What is known when everything is built and the first step has not yet begun."""

    config: Config
    output_dir: Path
    #: of the whole model, over all ranks
    parameters: int
    #: model FLOPs, forward and backward, nothing counted for recomputation
    flops_per_token: float
    #: over all ranks
    tokens_per_step: int
    world_size: int
    device_name: str
    #: package -> version
    versions: Mapping[str, str]
    #: further facts on the machine, written to result.json as they are
    hardware: Mapping[str, Any]
    #: number (1-based) of the step that comes first; more than 1 in a resumed run
    first_step: int
    #: losses of the steps before first_step, in order
    earlier_losses: Sequence[float]
    #: None: Megatron's own switches act
    plan: Plan | None
    baseline: Choice
    #: what another run must share with this one for their times to be comparable
    fingerprint: Mapping[str, Any]


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step on the reporting rank."""

    #: most bytes held for backward on the device at one time
    peak_saved_bytes: int
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    #: of the CUDA allocator; None on a CPU
    peak_allocated_bytes: int | None
    rss_bytes: int


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step."""

    #: 1-based
    step: int
    loss: float
    #: before clipping; None when it was not computed
    grad_norm: float | None
    lr: float
    #: over all ranks
    tokens: int
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    memory: StepMemory
    under: Under = "plan"


@dataclass(frozen=True)
class RankUse:
    """One rank in the last step of an interval. None where there is no GPU."""

    rank: int
    #: of the pipeline
    stage: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    #: compute stood still for copies over the link
    stall_s: float
    peak_saved_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_bytes: int | None
    #: host memory taken for offloading, and how much of it may be
    host_pool_bytes: int
    host_limit_bytes: int
    rss_bytes: int


@dataclass(frozen=True)
class Copies:
    """Copies of one step between device and host, the reporting rank's."""

    out_bytes: int
    #: while copying: the sum of the copies' own times
    out_s: float
    back_bytes: int
    back_s: float
    #: of a large copy alone, measured before the first step
    link_out_bytes_per_s: float
    link_back_bytes_per_s: float
    #: what the driver counted meanwhile, all traffic; None: not offered here
    counted_out_bytes: int | None
    counted_back_bytes: int | None


@dataclass(frozen=True)
class Interval:
    """What is looked at more closely every `trainer.log_every` steps."""

    #: the last step of the interval, of which all but `delta` tells
    step: int
    under: Under
    ranks: Sequence[RankUse]
    #: of the reporting rank's peak: what for -> bytes
    categories: Mapping[str, int]
    #: site -> action -> bytes in the step, the reporting rank's
    sites: Mapping[str, Mapping[str, int]]
    #: None: nothing is copied
    copies: Copies | None
    #: forward FLOPs that backward does again, by recomputed module
    recomputed_flops_per_token: Mapping[str, float]
    #: medians of the interval over the baseline's
    delta: Delta | None


@dataclass(frozen=True)
class Advice:
    """A threshold of the guard group that was passed, and what to do about it."""

    #: the key under `guard`
    threshold: str
    problem: str
    #: what to type, or to set where no override does it
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} (guard.{self.threshold}): {self.remedy}"


@dataclass(frozen=True)
class EffectRow:
    """What one requested memory option did in the first step; no layers means that it did nothing."""

    name: str
    #: recompute or offload
    action: str
    layers: int
    #: None where they can't be told (engine=megatron)
    bytes: int | None
    #: why nothing happened, or what is worth knowing
    remark: str


@dataclass(frozen=True)
class RunEnd:
    status: Status
    val_loss: float | None
    #: why the run stopped, for a person
    message: str


class Observer(Protocol):
    """Watches a run; must not disturb it."""

    def run_started(self, info: RunInfo) -> None: ...

    def step_done(self, record: StepRecord) -> None: ...

    def effects(self, rows: Sequence[EffectRow]) -> None: ...

    def interval(self, interval: Interval) -> None: ...

    def advised(self, step: int, advice: Sequence[Advice]) -> None: ...

    def evaluated(self, step: int, val_loss: float) -> None: ...

    def run_ended(self, end: RunEnd) -> None: ...
