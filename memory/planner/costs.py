"""What one layer costs on one rank for one micro-batch: seconds by piece, bytes by site and by weight.

Closed form from a LayerShape and a device's rates; a calibrated run scales or replaces the seconds. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from memory.sites import SITES, LayerShape

#: the pieces of a layer's forward pass in order, and the sites that each saves for its own backward
PIECES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_norm": ("layer_input",),
        "qkv": ("attn_norm_out",),
        "core": ("query", "key", "value", "attn_scores", "core_attn_out"),
        "proj": (),
        "mlp_norm": ("mlp_residual",),
        "fc1": ("mlp_norm_out",),
        "act": ("fc1_out",),
        "fc2": ("act_out",),
    }
)
#: how a site is made again: from which other, by which piece
REMADE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "attn_norm_out": ("layer_input", "attn_norm"),
        "mlp_norm_out": ("mlp_residual", "mlp_norm"),
        "fc1_out": ("mlp_norm_out", "fc1"),
        "act_out": ("fc1_out", "act"),
    }
)
#: arithmetic of a piece's backward takes so many times its forward: the input's gradient and the weight's
_BACKWARD = 2.0
#: pieces whose output is summed up over the tensor-parallel ranks
_EXCHANGED = ("proj", "fc2")


@dataclass(frozen=True)
class Rates:
    """What a device and its links do in a second."""

    #: projections and MLP while training, all that runs between them included
    linear_flops: float
    #: one large matrix product by itself
    product_flops: float
    #: the attention core, of the causal half, forward and backward together
    attention_flops: float
    #: device memory traffic of element-wise work, read and written
    device_bytes: float
    #: device to host and back, each way
    link_bytes: float
    #: between tensor-parallel ranks, each way
    peer_bytes: float
    #: between data-parallel ranks, each way
    network_bytes: float


@dataclass(frozen=True)
class LayerCost:
    shape: LayerShape
    #: forward, by piece
    seconds: Mapping[str, float]
    #: a gradient's bytes, by piece
    gradient_bytes: Mapping[str, int]
    #: seconds that compute loses for a byte that crosses the link, either way: both use the device's memory
    seconds_per_copied_byte: float
    #: of that, in each of _EXCHANGED, for the sum over tensor-parallel ranks
    exchange_s: float = 0.0
    #: kept values are views of a buffer that holds queries and keys too (no Transformer Engine)
    value_keeps_qkv: bool = False
    #: kept by every layer beside its sites: dropout masks
    rest_bytes: int = 0

    def __hash__(self) -> int:
        return hash((self.shape, tuple(self.seconds.items()), self.rest_bytes))

    @cached_property
    def site_bytes(self) -> Mapping[str, int]:
        """Bytes that move where the site is offloaded, or come into being where it is recomputed."""
        return {name: site.bytes_of(self.shape) for name, site in SITES.items()} | {"rest": self.rest_bytes}

    @cached_property
    def kept_bytes(self) -> Mapping[str, int]:
        """Bytes that stay where the site is kept."""
        kept = dict(self.site_bytes)
        if self.value_keeps_qkv:
            kept["value"] = self.shape.sharded(self.shape.query_width + 2 * self.shape.kv_width)
        return kept

    @property
    def forward_s(self) -> float:
        return sum(self.seconds.values())

    def backward_s(self, piece: str) -> float:
        """What ranks exchange in backward is as much as in forward: the gradient of the input."""
        return _BACKWARD * self.seconds[piece] - (self.exchange_s if piece in _EXCHANGED else 0.0)

    @property
    def all_gradient_bytes(self) -> int:
        return sum(self.gradient_bytes.values())


def weight_elements(shape: LayerShape) -> dict[str, int]:
    """Elements of the weight of each piece on one rank."""
    hidden, split = shape.hidden, shape.tensor_parallel
    return {
        "attn_norm": hidden,
        "qkv": hidden * (shape.query_width + 2 * shape.kv_width) // split,
        "proj": hidden * shape.query_width // split,
        "mlp_norm": hidden,
        "fc1": hidden * shape.ffn * (2 if shape.gated else 1) // split,
        "fc2": hidden * shape.ffn // split,
    }


def with_seconds(cost: LayerCost, measured: Mapping[str, float]) -> LayerCost:
    """With these pieces' forward seconds as measured. The layer's sum stays what it was: fc2 makes up for it."""
    seconds = dict(cost.seconds) | dict(measured)
    seconds["fc2"] = max(seconds["fc2"] + cost.forward_s - sum(seconds.values()), cost.exchange_s)
    return replace(cost, seconds=MappingProxyType(seconds))


def closed_form(shape: LayerShape, rates: Rates, *, value_keeps_qkv: bool = False, rest_bytes: int = 0) -> LayerCost:
    """Seconds from counts of operations and bytes.

    Matrix products run at product_flops, element-wise pieces at device_bytes; what linear_flops says a layer takes
    beyond that (rotary embedding, residual sums, gaps) goes to fc2, which nothing recomputes by itself.
    """
    elements, ranks = weight_elements(shape), shape.tensor_parallel
    size = {name: site.bytes_of(shape) for name, site in SITES.items()}
    flops = {piece: 2.0 * shape.tokens * count for piece, count in elements.items() if "norm" not in piece}
    seconds = {
        "attn_norm": (size["layer_input"] + size["attn_norm_out"]) / rates.device_bytes,
        "qkv": flops["qkv"] / rates.product_flops,
        "core": 2.0 * shape.tokens * shape.seq_length * shape.query_width / ranks / rates.attention_flops,
        "proj": flops["proj"] / rates.product_flops,
        "mlp_norm": (size["mlp_residual"] + size["mlp_norm_out"]) / rates.device_bytes,
        "fc1": flops["fc1"] / rates.product_flops,
        "act": (size["fc1_out"] + size["act_out"]) / rates.device_bytes,
        "fc2": flops["fc2"] / rates.product_flops,
    }
    linear_s = sum(seconds.values()) - seconds["core"]
    seconds["fc2"] += max(0.0, sum(flops.values()) / rates.linear_flops - linear_s)
    # An all-reduce's worth (under sequence parallelism a gather and a scatter).
    exchange_s = 2 * (ranks - 1) / ranks * shape.tokens * shape.hidden * shape.element_bytes / rates.peer_bytes
    for piece in _EXCHANGED:
        seconds[piece] += exchange_s
    return LayerCost(
        shape=shape,
        seconds=MappingProxyType(seconds),
        gradient_bytes=MappingProxyType({piece: count * shape.element_bytes for piece, count in elements.items()}),
        seconds_per_copied_byte=0.5 / rates.device_bytes,
        exchange_s=exchange_s,
        value_keeps_qkv=value_keeps_qkv,
        rest_bytes=rest_bytes,
    )
