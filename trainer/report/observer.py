"""What a run tells whoever watches it. Imports no torch.

The run calls, in this order: `run_started` once; then for each step `step_done`, with `effects` once after the first
of them under the plan, and `evaluated` after each evaluation; `run_ended` once, also when the run failed. Every rank
may call: whether anything is written is the observer's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.config.schema import Config
from trainer.report.baseline import Choice, Under

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

    def evaluated(self, step: int, val_loss: float) -> None: ...

    def run_ended(self, end: RunEnd) -> None: ...
