"""A small model in bf16 with Transformer Engine's modules, run under plans on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memory.engine.engine import MemoryEngine
from memory.engine.ledger import StepBytes
from memory.plan import Plan
from memory.seed import Request
from memory.sites import LayerShape
from models.config import ModelConfig

MODEL = ModelConfig(
    num_layers=6,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=8,
    num_query_groups=2,
    seq_length=512,
    vocab_size=1024,
)
BATCH = 2
SHAPE = LayerShape(
    seq_length=MODEL.seq_length,
    micro_batch_size=BATCH,
    hidden=MODEL.hidden_size,
    ffn=MODEL.ffn,
    heads=MODEL.num_attention_heads,
    query_width=MODEL.query_width,
    kv_width=MODEL.kv_width,
    gated=True,
    fused_attention=True,
    element_bytes=2,
)


@dataclass
class Run:
    losses: list[torch.Tensor]
    #: gradients after the last micro-batch of each step
    gradients: list[dict[str, torch.Tensor]]
    steps: list[StepBytes]
    engine: MemoryEngine


def run_plan(
    plan: Plan,
    requests: Sequence[Request] = (),
    *,
    steps: int = 2,
    micro_batches: int = 2,
    prepare: Callable[[MemoryEngine], None] | None = None,
    seq_lengths: Sequence[int] = (),
    between_steps: Callable[[torch.nn.Module], None] | None = None,
) -> Run:
    """Forward and backward of some steps from one seed; no optimizer, so that steps are comparable one by one."""
    from megatron.core import tensor_parallel

    from models.builder import build_gpt, transformer_config

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    assert MODEL.vocab_size
    (chunk,) = build_gpt(MODEL, transformer_config(MODEL, bf16=True), vocab_size=MODEL.vocab_size)
    chunk.bfloat16()
    engine = MemoryEngine(plan, requests, host_limit_bytes=8 << 30)
    engine.attach([chunk])
    if prepare:
        prepare(engine)
    result = Run([], [], [], engine)
    for step in range(steps):
        chunk.zero_grad()
        engine.begin_step()
        for micro in range(micro_batches):
            length = seq_lengths[step % len(seq_lengths)] if seq_lengths else MODEL.seq_length
            loss = chunk(**_batch(10 * step + micro, length)).float().mean()
            loss.backward()
            result.losses.append(loss.detach())
        result.steps.append(engine.end_step())
        result.gradients.append({name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None})
        if between_steps:
            between_steps(chunk)
    torch.cuda.synchronize()
    return result


def _batch(seed: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    assert MODEL.vocab_size
    tokens = torch.randint(MODEL.vocab_size, (BATCH, length + 1), generator=generator).cuda()
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(length, device="cuda").expand(BATCH, -1),
        "attention_mask": None,
    }


def differences(run: Run, reference: Run) -> tuple[int, float]:
    """(gradient tensors and losses that are not bitwise equal, largest relative difference of a gradient)."""
    unequal, worst = 0, 0.0
    for ours, theirs in zip(run.losses, reference.losses, strict=True):
        unequal += not torch.equal(ours, theirs)
    for ours_by_name, theirs_by_name in zip(run.gradients, reference.gradients, strict=True):
        for name, gradient in ours_by_name.items():
            other = theirs_by_name[name]
            if not torch.equal(gradient, other):
                unequal += 1
                worst = max(worst, float((gradient.float() - other.float()).norm() / other.float().norm()))
    return unequal, worst
