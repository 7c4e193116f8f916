"""The two settings that were measured on an H200 (megatron-core 0.19.2, Transformer Engine 2.11, bf16, optim=none)."""

from __future__ import annotations

from memory.plan import LayerPlan, Plan
from memory.planner.costs import Rates, closed_form
from memory.planner.stage import Head, Stage
from memory.sites import LayerShape

GIB = 1 << 30
_VOCAB, _HIDDEN = 32000, 4096
_PEAK = 989.4e12


def rates() -> Rates:
    return Rates(0.60 * _PEAK, 0.78 * _PEAK, 0.50 * _PEAK, _PEAK / 300, 55e9, 300e9, 40e9)


def stage(layers: int, seq_length: int, micro_batch: int) -> Stage:
    """One GPU with all layers of Llama-3-8B's width and the full loss head over 32,000 tokens."""
    shape = LayerShape(seq_length, micro_batch, _HIDDEN, 14336, 32, 4096, 1024, True, True, 2)
    cost = closed_form(shape, rates())
    table_bytes, logits = _VOCAB * _HIDDEN * 2, shape.tokens * _VOCAB
    product_s = 2 * logits * _HIDDEN / rates().product_flops
    return Stage(
        cost=cost,
        chunks=(tuple(range(layers)),),
        rank=0,
        size=1,
        micro_batches=1,
        weight_bytes=layers * cost.all_gradient_bytes + 2 * table_bytes,
        gradient_bytes=0,
        optimizer_bytes=0,
        workspace_bytes=64 << 20,
        link_bytes_per_s=rates().link_bytes,
        gradients_grow=True,
        head=Head(2 * shape.residual() + 4 * logits, 2 * logits, table_bytes, product_s, 2 * product_s),
        embedding_gradient_bytes=table_bytes,
    )


def setting_a() -> Stage:
    return stage(8, 4096, 4)


def setting_b() -> Stage:
    return stage(16, 32768, 1)


def whole_layers(count: int) -> Plan:
    return Plan((LayerPlan(),) * count, spans=tuple((number, number + 1) for number in range(count)))
