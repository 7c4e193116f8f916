"""The catalogue of sites: each tensor that a transformer layer keeps for backward, and the names users type for them.

A site is one tensor of one layer. Module names are Megatron's where Megatron has one; each stands for one or more
sites, or for a region of modules that is re-run as a whole. Imports no torch: plans are made and printed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer on one rank for one micro-batch, from which the bytes of each site follow."""

    seq_length: int
    micro_batch_size: int
    hidden: int
    ffn: int
    heads: int
    query_width: int
    kv_width: int
    gated: bool
    #: softmax scores are never stored (sdpa, flash, cuDNN)
    fused_attention: bool
    element_bytes: int
    tensor_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        return self.seq_length * self.micro_batch_size // self.context_parallel

    def sharded(self, width: int) -> int:
        """Bytes of a [tokens, width] tensor split over tensor-parallel ranks by width."""
        return self.tokens * width * self.element_bytes // self.tensor_parallel

    def residual(self) -> int:
        """Bytes of a [tokens, hidden] tensor, split over tensor-parallel ranks by token under sequence parallelism."""
        split = self.tensor_parallel if self.sequence_parallel else 1
        return self.tokens * self.hidden * self.element_bytes // split

    def scores(self) -> int:
        """Bytes that the attention core keeps beside its inputs and its output."""
        rows = self.tokens * self.heads // self.tensor_parallel
        return 4 * rows if self.fused_attention else rows * self.seq_length * self.element_bytes


@dataclass(frozen=True)
class Site:
    name: str
    holds: str
    #: bytes of one layer's tensor, by the closed form; `rest` is only known by measuring
    bytes_of: Callable[[LayerShape], int]
    #: what re-making it costs; empty: it can't be re-made from the layer's other tensors by one module
    recompute: str = ""


_CATALOGUE = (
    Site("layer_input", "input of the layer (of its first norm)", LayerShape.residual),
    Site("attn_norm_out", "output of the norm before attention: input of linear_qkv", LayerShape.residual, "the norm"),
    Site("query", "query after position embedding", lambda s: s.sharded(s.query_width)),
    Site("key", "key after position embedding", lambda s: s.sharded(s.kv_width)),
    Site("value", "value: a view that, kept, keeps the whole mixed qkv buffer", lambda s: s.sharded(s.kv_width)),
    Site(
        "attn_scores",
        "what the attention core keeps besides: softmax statistics, or S x S scores if unfused",
        LayerShape.scores,
    ),
    Site("core_attn_out", "output of the attention core: input of linear_proj", lambda s: s.sharded(s.query_width)),
    Site("mlp_residual", "residual stream after attention (input of the second norm)", LayerShape.residual),
    Site("mlp_norm_out", "output of the norm before the MLP: input of linear_fc1", LayerShape.residual, "the norm"),
    Site(
        "fc1_out",
        "output of linear_fc1: input of the activation",
        lambda s: s.sharded(s.ffn * (2 if s.gated else 1)),
        "one matrix product",
    ),
    Site("act_out", "output of the activation: input of linear_fc2", lambda s: s.sharded(s.ffn), "element-wise"),
    Site("rest", "all else: norm statistics, rotary tables, dropout masks", lambda s: 0),
)

SITES: Mapping[str, Site] = MappingProxyType({site.name: site for site in _CATALOGUE})


@dataclass(frozen=True)
class Module:
    """A name that users type under recompute.modules or offload.modules."""

    name: str
    means: str
    sites: tuple[str, ...] = ()
    #: the span of modules re-run as a whole, instead of sites
    region: str = ""


def _by_name(*modules: Module) -> Mapping[str, Module]:
    return MappingProxyType({module.name: module for module in modules})


RECOMPUTE_MODULES = _by_name(
    Module("layernorm", "outputs of both norms", ("attn_norm_out", "mlp_norm_out")),
    Module("attn_norm", "output of the norm before attention", ("attn_norm_out",)),
    Module("mlp_norm", "output of the norm before the MLP", ("mlp_norm_out",)),
    Module("mlp_act", "output of the activation, linear_fc2's input: element-wise, nearly free", ("act_out",)),
    Module(
        "mlp_fc1",
        "output of linear_fc1, the largest tensor of a dense layer: one of its three products again",
        ("fc1_out",),
    ),
    Module("core_attn", "the attention core as a region: pays only where attention is unfused", region="core_attn"),
    Module("mlp", "the MLP as a region: all of it again", region="mlp"),
)

OFFLOAD_MODULES = _by_name(
    Module("attn_norm", "the norm's input, which is the layer's", ("layer_input",)),
    Module("qkv_linear", "its input, the norm's output", ("attn_norm_out",)),
    Module(
        "core_attn", "query, key, value, scores and output", ("query", "key", "value", "attn_scores", "core_attn_out")
    ),
    Module("attn_proj", "its input, the attention core's output", ("core_attn_out",)),
    Module("mlp_norm", "the norm's input, the residual after attention", ("mlp_residual",)),
    Module("mlp_fc1", "its input, the norm's output", ("mlp_norm_out",)),
    Module("mlp_act", "its input, linear_fc1's output: the largest tensor of a dense layer", ("fc1_out",)),
)

#: names of sites that lie inside each region, so that the region leaves nothing of them to keep
INSIDE_REGION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"core_attn": ("attn_scores",), "mlp": ("fc1_out", "act_out")}
)

_EXPERTS = "this model has no experts"
#: Megatron's names that mean nothing on a dense model, and why
ABSENT_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "moe": _EXPERTS,
        "moe_act": _EXPERTS,
        "shared_experts": _EXPERTS,
        "expert_fc1": _EXPERTS,
        "fused_group_mlp": _EXPERTS,
        "mla_up_proj": "this model has no multi-latent attention",
        "gdn_norm_out": "this model has no gated delta net",
    }
)
