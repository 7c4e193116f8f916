"""The seed options: what a user asks for by Megatron's names, before a plan is made of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Granularity(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Method(Enum):
    uniform = "uniform"
    block = "block"


class OffloadKind(Enum):
    none = "none"
    fine_grained = "fine_grained"
    layerwise = "layerwise"


@dataclass(frozen=True)
class RecomputeOptions:
    #: none, parts of each layer, or whole layers: what the options of the group set
    granularity: Granularity = Granularity.none
    #: selective: what to recompute, by Megatron's module names; None: what pays on this model
    modules: list[str] | None = None
    #: full: uniform checkpoints every num_layers layers as one; block only the first num_layers of each chunk
    method: Method | None = None
    #: full: layers that one checkpoint spans (uniform), or how many layers have one (block)
    num_layers: int | None = None
    #: full: shard each checkpoint's saved input over the tensor-parallel ranks
    distribute_saved_activations: bool = False


@dataclass(frozen=True)
class OffloadOptions:
    #: nothing, tensors of modules by name, or all of whole layers: what the options of the group set
    kind: OffloadKind = OffloadKind.none
    #: fine_grained: whose tensors go to host memory, by Megatron's module names; None: all that this model has
    modules: list[str] | None = None
    #: fine_grained: smaller tensors stay (Megatron counts elements; these are bytes)
    min_bytes: int = 1 << 18
    #: fine_grained: share of the eligible bytes that goes, first in forward order
    fraction: float = 1.0
    #: layerwise: the first so many layers; None: all but the last
    num_layers: int | None = None
    #: layerwise: offload what layers save for backward
    activations: bool = True
    #: layerwise: offload weights (not offered)
    weights: bool = False
    #: layerwise: reload into two alternating device buffers instead of fresh allocations
    double_buffering: bool = False
    #: page-locked host memory that each rank may take; None: its part of 80% of what is free (GPU only)
    host_limit_gib: float | None = None
