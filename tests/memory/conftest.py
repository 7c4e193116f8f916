from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from memory.engine.engine import MemoryEngine
from memory.engine.ledger import StepBytes
from memory.plan import Plan, keep_plan
from memory.sites import LayerShape
from models import cpu
from models.config import Activation, Attention, ModelConfig, Normalization, Position

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=16,
    vocab_size=64,
    hidden_dropout=0.1,
)
#: the other corner of the options: learned positions, biases, GELU, LayerNorm, no GQA, tied, S x S scores
GPT2_LIKE = replace(
    MODEL,
    num_query_groups=None,
    normalization=Normalization.layernorm,
    activation=Activation.gelu,
    position=Position.learned,
    bias=True,
    tied_embeddings=True,
    attention=Attention.unfused,
    attention_dropout=0.1,
)
#: without a GPU, sdpa with dropout takes torch's plain path, which stores scores
SDPA_DROPOUT = replace(MODEL, attention_dropout=0.1)
BATCH = 2


def shape_of(model: ModelConfig) -> LayerShape:
    return LayerShape(
        seq_length=model.seq_length,
        micro_batch_size=BATCH,
        hidden=model.hidden_size,
        ffn=model.ffn,
        heads=model.num_attention_heads,
        query_width=model.query_width,
        kv_width=model.kv_width,
        gated=model.gated,
        fused_attention=model.attention is not Attention.unfused and not model.attention_dropout,
        element_bytes=4,
    )


@pytest.fixture(scope="module", autouse=True)
def parallel_groups() -> Iterator[None]:
    cpu.install()
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@dataclass
class Run:
    """Three optimizer steps of two micro-batches under a plan."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    steps: list[StepBytes]
    engine: MemoryEngine


def build(model: ModelConfig) -> torch.nn.Module:
    from megatron.core import tensor_parallel

    from models.builder import build_gpt, transformer_config

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    assert model.vocab_size
    (chunk,) = build_gpt(model, transformer_config(model), vocab_size=model.vocab_size)
    return chunk


def batch(model: ModelConfig, seed: int) -> dict[str, Any]:
    assert model.vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (BATCH, model.seq_length + 1), generator=generator)
    causal = torch.ones(1, 1, model.seq_length, model.seq_length).tril() < 0.5
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(model.seq_length).expand(BATCH, -1),
        "attention_mask": causal,
    }


def run_plan(model: ModelConfig, plan: Plan, requests: tuple[Any, ...] = (), steps: int = 3) -> Run:
    from megatron.core import tensor_parallel

    chunk = build(model)
    engine = MemoryEngine(plan, requests)
    engine.attach([chunk])
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2)
    result = Run([], [], [], engine)
    for step in range(steps):
        optimizer.zero_grad()
        engine.begin_step()
        for micro in range(2):
            loss = chunk(**batch(model, 10 * step + micro)).mean()
            loss.backward()
            result.losses.append(loss.detach())
        result.steps.append(engine.end_step())
        result.gradients.append({name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None})
        optimizer.step()
    return result


_KEPT: dict[ModelConfig | str, Run] = {}


@pytest.fixture(scope="session")
def kept() -> Callable[[ModelConfig], Run]:
    """The run that keeps everything, once for each model."""

    def get(model: ModelConfig) -> Run:
        key = repr(model)
        if key not in _KEPT:
            _KEPT[key] = run_plan(model, keep_plan(model.num_layers))
        return _KEPT[key]

    return get


def assert_bitwise(run: Run, reference: Run) -> None:
    """Losses of every micro-batch and every gradient of every step, to the last bit."""
    assert len(run.losses) == len(reference.losses) > 0
    for ours, theirs in zip(run.losses, reference.losses, strict=True):
        assert torch.equal(ours, theirs)
    for step, (ours_by_name, theirs_by_name) in enumerate(zip(run.gradients, reference.gradients, strict=True)):
        assert ours_by_name.keys() == theirs_by_name.keys()
        for name, gradient in ours_by_name.items():
            assert torch.equal(gradient, theirs_by_name[name]), f"step {step}: gradient of {name}"
    assert run.engine.held_bytes == 0
