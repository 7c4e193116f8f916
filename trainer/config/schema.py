"""Everything a user can set, typed. Imports no torch.

Frozen: once composed and checked, a configuration is a value. Groups of conf/ fill the nodes of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, List, Optional

from memory.options import OffloadOptions, RecomputeOptions
from models.config import ModelConfig


class Engine(Enum):
    stash = "stash"
    megatron = "megatron"


@dataclass(frozen=True)
class EngineConfig:
    #: stash: ours, any plan; megatron: the same options through Megatron's own switches, for comparison
    name: Engine = Engine.stash


class PlanSource(Enum):
    options = "options"
    file = "file"
    auto = "auto"


class PlanObjective(Enum):
    time = "time"
    memory = "memory"


@dataclass(frozen=True)
class PlanConfig:
    #: options: made from the recompute and offload groups; file: read from path; auto: the cheapest within budget
    source: PlanSource = PlanSource.options
    #: YAML of the layout that each run writes as plan.yaml; a file in conf/plans or a library's plans goes by its name
    path: Optional[str] = None
    #: auto: device memory that a step may take: 70GiB, 800MiB, or a share of the device's such as 0.9
    budget: Optional[str] = None
    #: auto: time: the fastest step within budget; memory: the smallest peak within max_slowdown
    objective: PlanObjective = PlanObjective.time
    #: objective=memory, experiment=ladder: how much longer than keeping everything a step may take, as a share
    max_slowdown: float = 0.05
    #: auto: steps after which the plan is sought anew with what they measured; 0: never
    calibrate_steps: int = 0
    #: estimates are for so many processes; None: those of this launch, or one copy of the model
    processes: Optional[int] = None


class DataSource(Enum):
    stdlib = "stdlib"
    text = "text"
    megatron = "megatron"
    mock = "mock"
    registered = "registered"


@dataclass(frozen=True)
class DataConfig:
    #: stdlib: the running Python's own library sources; text: files; megatron: .bin/.idx prefixes; mock: random tokens;
    #: registered: what opener gives
    source: DataSource = DataSource.stdlib
    #: text: a file, glob or list of them; megatron: a prefix, or a list [weight, prefix, weight, prefix, ...]
    path: Any = None
    #: byte, or the path of a Hugging Face tokenizer.json
    tokenizer: str = "byte"
    #: shares of train, validation and test, by document
    split: str = "95,5,0"
    #: where tokenised text and indexes are kept; None: the user's cache folder
    cache_dir: Optional[str] = None
    #: mock, megatron without a tokenizer: number of token ids
    vocab_size: Optional[int] = None
    #: registered: the name under which an installed package registers its source (entry points megafit.data)
    opener: Optional[str] = None
    #: what to pass to the opener, checked against its parameters
    extras: Dict[str, Any] = field(default_factory=dict)


class OptimizerName(Enum):
    adam = "adam"
    sgd = "sgd"
    #: forward and backward alone, to measure them: gradients are dropped
    none = "none"


class DecayStyle(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_square_root = "inverse-square-root"


@dataclass(frozen=True)
class OptimConfig:
    name: OptimizerName = OptimizerName.adam
    lr: float = 3e-3
    min_lr: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    sgd_momentum: float = 0.9
    #: largest gradient norm; 0 leaves gradients as they are
    clip_grad: float = 1.0
    #: steps over which the rate rises from 0; None: a fifth of the schedule
    warmup_steps: Optional[int] = None
    decay_style: DecayStyle = DecayStyle.cosine


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of Megatron's parallel groups; data parallelism takes what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    #: model chunks per pipeline stage (interleaved schedule); None: one
    virtual_pipeline: Optional[int] = None
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    #: interleaved schedule: overlap stage-to-stage sends with compute (needed for two stages)
    overlap_p2p_comm: bool = False
    grad_reduce_in_fp32: bool = True
    #: seconds until a stuck collective fails
    timeout_s: int = 600


class Precision(Enum):
    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(frozen=True)
class TrainerConfig:
    steps: int = 500
    #: sequences per forward on one data-parallel rank
    micro_batch_size: int = 8
    #: sequences per optimizer step over all ranks; None: micro_batch_size x data-parallel size
    global_batch_size: Optional[int] = None
    #: auto: bf16 on GPUs, fp32 on the CPU
    precision: Precision = Precision.auto
    seed: int = 1234
    #: 0: only at the end
    eval_every: int = 0
    #: micro-batches per data-parallel rank in one evaluation; 0: never evaluate
    eval_batches: int = 8
    #: steps between checkpoints; 0: only when stopped by a signal
    checkpoint_every: int = 0
    #: how many checkpoints stay on disk
    checkpoint_keep: int = 2
    #: length of the learning-rate schedule; None: steps
    schedule_steps: Optional[int] = None
    #: steps between lines in the logs and in wandb
    log_every: int = 10
    #: cuDNN, cuBLAS and attention kernels that repeat to the bit
    deterministic: bool = False


class BaselineMode(Enum):
    auto = "auto"
    probe = "probe"
    file = "file"
    off = "off"


@dataclass(frozen=True)
class BaselineConfig:
    """What the run's times and peaks are held against: the same training with everything kept."""

    #: auto: first steps keep everything, else probe; probe: they keep some layers, scaled; file: from path; off: none
    mode: BaselineMode = BaselineMode.auto
    #: steps to take the medians of, after three of warm-up
    steps: int = 5
    #: file: folder of a run with everything kept, or one above it; the run with this one's fingerprint is taken
    path: Optional[str] = None


class GuardAction(Enum):
    warn = "warn"
    stop = "stop"
    adapt = "adapt"


@dataclass(frozen=True)
class GuardConfig:
    """Thresholds, each a share of 1, or null for none; looked at every trainer.log_every steps."""

    #: warn: say what to type; stop: and end the run, with a checkpoint; adapt: and go on under the next thriftier plan
    action: GuardAction = GuardAction.warn
    #: peak of allocated memory, of the device's
    peak: Optional[float] = 0.9
    #: of the memory that the allocator holds at the peak, what is unused
    unused_reserved: Optional[float] = 0.25
    #: what copies need, of what the link carries during forward (out) or backward (back)
    link: Optional[float] = 0.9
    #: host memory taken for offloading, of what may be taken
    host: Optional[float] = 0.9
    #: loss of MFU, of the baseline's
    mfu_drop: Optional[float] = 0.1
    #: backward time added, of the baseline's
    backward: Optional[float] = 0.2
    #: FLOPs done again, of the model's
    recomputed_flops: Optional[float] = 0.15
    #: a recomputed module that frees less than this of all that would be kept ...
    module_saves: Optional[float] = 0.01
    #: ... and does more than this of the model's FLOPs again
    module_costs: float = 0.02


class ProfileKind(Enum):
    none = "none"
    trace = "trace"
    memory = "memory"
    nvtx = "nvtx"


@dataclass(frozen=True)
class ProfileConfig:
    #: trace: a timeline; memory: the CUDA allocator's history; nvtx: ranges for Nsight Systems
    kind: ProfileKind = ProfileKind.none
    #: steps to look at, after the plan's warm-up
    steps: int = 3


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(frozen=True)
class LoggerConfig:
    #: None: WANDB_MODE, else online with credentials and offline without
    wandb_mode: Optional[WandbMode] = None
    project: str = "megafit"
    entity: Optional[str] = None
    #: None: the sweep's folder or the experiment's name
    group: Optional[str] = None
    name: Optional[str] = None
    tags: List[str] = field(default_factory=list)
    base_url: Optional[str] = None
    #: live progress on the terminal
    progress: bool = True


@dataclass(frozen=True)
class HardwareConfig:
    #: auto: by the device's name
    name: str = "auto"
    #: regular expression that the device's name matches (auto looks through conf/hardware)
    match: Optional[str] = None
    #: dense, without sparsity; None: measured (CPU)
    peak_bf16_tflops: Optional[float] = None
    memory_gib: Optional[float] = None
    #: device to host, one direction, GB/s by the data sheet
    link_gbps: Optional[float] = None


class Objective(Enum):
    val_loss = "val_loss"
    token_s = "token_s"
    peak_bytes = "peak_bytes"


@dataclass(frozen=True)
class Config:
    """The whole of one run's configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    plan: PlanConfig = field(default_factory=PlanConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    #: an option that changes nothing on this model is an error, not a warning
    strict: bool = False
    #: what sweepers that search minimise: the validation loss, the time a token, or the peak memory of the report
    objective: Objective = Objective.val_loss
    #: compose, check, print the configuration and the plan; train nothing
    validate_only: bool = False
    #: folder of an earlier run whose newest checkpoint to go on from
    resume: Optional[str] = None
    #: folder of a sweep to report on once more; trains nothing
    report: Optional[str] = None
    #: a key, or a section as model: print who set it, and what weaker places say; trains nothing
    explain: Optional[str] = None
    #: the team whose file was chosen by team=NAME
    team: Optional[str] = None
