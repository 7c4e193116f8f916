"""The MLP with its activation exposed against Megatron's, to the last bit."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from models.builder import transformer_config
from models.config import Activation, ModelConfig
from models.mlp import ExposedMLP

LINEARS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", Activation)
def test_output_and_gradients_equal_megatrons_mlp(activation: Activation, bias: bool, fusion: bool) -> None:
    if fusion and activation is Activation.gelu and not bias:
        pytest.skip("Megatron fuses GELU with a bias only")
    extras = {"bias_activation_fusion": fusion}
    config = transformer_config(ModelConfig(hidden_size=32, activation=activation, bias=bias, extras=extras))
    model_parallel_cuda_manual_seed(1)
    outcomes = []
    stock, exposed = MLP(config, LINEARS, ffn_hidden_size=128), ExposedMLP(config, LINEARS)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    exposed.load_state_dict(stock.state_dict())
    for mlp in (stock, exposed):
        device = next(mlp.parameters()).device
        hidden = torch.linspace(-2, 2, 6 * 2 * 32).view(6, 2, 32).to(device).requires_grad_()
        out, out_bias = mlp(hidden)
        out.backward(torch.linspace(-1, 1, out.numel(), device=device).view_as(out))
        gradients = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
        outcomes.append({"out": out, "hidden": hidden.grad, **gradients})
        assert (out_bias is None) == (not bias)
    expected, ours = outcomes
    assert expected.keys() == ours.keys() and len(ours) == (5 if bias else 4)
    for name in expected:
        assert torch.equal(ours[name], expected[name]), name


def test_the_activation_is_seen_between_the_linear_layers() -> None:
    config = transformer_config(ModelConfig(hidden_size=32, bias=True))
    model_parallel_cuda_manual_seed(1)
    mlp = ExposedMLP(config, LINEARS)
    seen = []
    mlp.activation.register_forward_hook(lambda module, args, out: seen.append((*args, out)))
    mlp(torch.ones(6, 2, 32, device=next(mlp.parameters()).device))
    ((fc1_out, bias, out),) = seen
    assert fc1_out.shape == (6, 2, 256)
    assert bias is mlp.linear_fc1.bias
    assert out.shape == (6, 2, 128)
    assert not list(mlp.activation.parameters())
