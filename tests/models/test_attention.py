"""SdpaCoreAttention against Megatron's unfused attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from models.attention import SdpaCoreAttention
from models.builder import transformer_config
from models.config import Attention, Layout, ModelConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares with unfused attention in fp32 on the CPU")

SMALL = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
LENGTH, BATCH = 24, 2


@pytest.fixture(autouse=True)
def seeded() -> None:
    model_parallel_cuda_manual_seed(5)


def core(kind: type, model: ModelConfig = SMALL, **config: Any) -> Any:
    return kind(transformer_config(model, **config), 1, AttnMaskType.causal, "self")


def qkv(groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(LENGTH, BATCH, heads, 16, generator=generator).requires_grad_() for heads in (4, groups, groups)
    ]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_output_and_gradients_equal_unfused_attention(groups: int) -> None:
    model = replace(SMALL, num_query_groups=groups)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    outcomes = []
    for kind in (SdpaCoreAttention, DotProductAttention):
        inputs = qkv(groups)
        out = core(kind, model)(*inputs, mask)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        outcomes.append([out.detach(), *(tensor.grad for tensor in inputs)])
    for ours, unfused in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, unfused, rtol=1e-5, atol=1e-5)
    assert outcomes[0][0].shape == (LENGTH, BATCH, 64)


def test_nothing_of_size_s_by_s_is_saved_without_dropout() -> None:
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        core(SdpaCoreAttention)(*qkv(4))
    assert saved and not any(shape.count(LENGTH) > 1 for shape in map(list, saved))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_generator_that_unfused_attention_uses(sequence_parallel: bool) -> None:
    """From the tensor-parallel stream, except under sequence parallelism."""
    layout = Layout(tensor=2 if sequence_parallel else 1, sequence_parallel=sequence_parallel)
    attention = core(SdpaCoreAttention, replace(SMALL, attention_dropout=0.5), layout=layout)
    default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    first = attention(*qkv(4))
    moved_default = not torch.equal(default, torch.get_rng_state())
    moved_tracked = not torch.equal(tracked, get_cuda_rng_tracker().get_states()["model-parallel-rng"])
    assert (moved_default, moved_tracked) == (sequence_parallel, not sequence_parallel)
    assert not torch.equal(first, attention(*qkv(4)))


def test_no_dropout_in_evaluation() -> None:
    attention = core(SdpaCoreAttention, replace(SMALL, attention_dropout=0.5)).eval()
    assert torch.equal(attention(*qkv(4)), core(SdpaCoreAttention)(*qkv(4)))


def test_what_sdpa_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="causal"):
        SdpaCoreAttention(transformer_config(SMALL), 1, AttnMaskType.no_mask, "self")
    with pytest.raises(ValueError, match=r"model\.attention=te"):
        core(SdpaCoreAttention, layout=Layout(context=2))
    with pytest.raises(ValueError, match=r"model\.attention=te"):
        core(SdpaCoreAttention, replace(SMALL, extras={"window_size": (8, 0)}))
    with pytest.raises(ValueError, match=r"model\.attention=te"):
        core(SdpaCoreAttention)(*qkv(4), packed_seq_params=object())


def test_a_model_with_sdpa_agrees_with_an_unfused_one(
    build: Callable[..., Any], loss_of: Callable[..., torch.Tensor]
) -> None:
    model = ModelConfig(num_layers=2, hidden_size=64, num_query_groups=2, seq_length=16)
    losses = [loss_of(build(replace(model, attention=kind))) for kind in (Attention.sdpa, Attention.unfused)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
