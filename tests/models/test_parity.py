"""Megafit's layer spec against Megatron's stock one, to the last bit, on the CPU in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.config import Activation, Attention, ModelConfig, Normalization, Position

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stock spec of a GPU fuses norms: no bitwise twin"
)

SMALL = ModelConfig(num_layers=2, hidden_size=64, seq_length=16, attention=Attention.unfused)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_query_groups": 2},
        {"normalization": Normalization.layernorm, "activation": Activation.gelu, "bias": True},
        {"activation": Activation.gelu},
        {"bias": True, "attention_dropout": 0.1, "hidden_dropout": 0.1},
        {"position": Position.learned, "tied_embeddings": True},
        {"rope_scaling_factor": 8.0, "rotary_base": 500000, "qkv_bias": True},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_the_stock_spec(
    change: dict[str, object], build: Callable[..., Any], loss_of: Callable[..., torch.Tensor]
) -> None:
    model = replace(SMALL, **change)  # type: ignore[arg-type]
    stock = build(model, seed=1, stock_spec=True)
    stock_loss = loss_of(stock)
    stock_loss.backward()

    ours = build(model, seed=2)
    ours.load_state_dict(stock.state_dict())
    _reseed(1, build, model)
    loss = loss_of(ours)
    loss.backward()

    assert torch.equal(loss, stock_loss)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert torch.equal(gradients.pop(name), parameter.grad), name
        assert parameter.grad.abs().sum() > 0, f"{name} gets no gradient: the comparison would prove nothing"
    assert not gradients


def _reseed(seed: int, build: Callable[..., Any], model: ModelConfig) -> None:
    """Put every generator where it stood after a model was built from this seed."""
    build(model, seed=seed, stock_spec=True)


def test_checkpoint_keys_are_those_of_the_stock_spec(build: Callable[..., Any]) -> None:
    groups = {"dp_cp_group": torch.distributed.group.WORLD}
    ours = build(SMALL).sharded_state_dict(metadata=groups)
    stock = build(SMALL, stock_spec=True).sharded_state_dict(metadata=groups)
    assert {entry.key for entry in ours.values()} == {entry.key for entry in stock.values()}
