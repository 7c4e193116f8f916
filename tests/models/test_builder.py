"""From a ModelConfig to Megatron's configuration and modules."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models import builder, compat
from models.builder import resolve_attention, transformer_config
from models.config import Activation, Attention, Layout, ModelConfig, Normalization, Position

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is built without a GPU")


def test_every_key_reaches_megatron() -> None:
    model = ModelConfig(
        num_layers=6,
        hidden_size=96,
        ffn_hidden_size=100,
        num_attention_heads=6,
        num_query_groups=3,
        kv_channels=20,
        normalization=Normalization.layernorm,
        layernorm_epsilon=1e-6,
        activation=Activation.gelu,
        bias=True,
        qkv_bias=True,
        attention_dropout=0.25,
        hidden_dropout=0.5,
        init_method_std=0.01,
        extras={"attention_softmax_in_fp32": False},
    )
    layout = Layout(tensor=3, pipeline=2, virtual_pipeline=3, sequence_parallel=True, overlap_p2p_comm=True)
    switches = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    config = transformer_config(model, layout, bf16=True, switches=switches)
    expected = {
        "num_layers": 6,
        "hidden_size": 96,
        "ffn_hidden_size": 100,
        "num_attention_heads": 6,
        "num_query_groups": 3,
        "kv_channels": 20,
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-6,
        "activation_func": F.gelu,
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "attention_dropout": 0.25,
        "hidden_dropout": 0.5,
        "init_method_std": 0.01,
        "attention_softmax_in_fp32": False,
        "tensor_model_parallel_size": 3,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 3,
        "sequence_parallel": True,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bias_activation_fusion": True,
        "deterministic_mode": False,
        **switches,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_llama_defaults() -> None:
    config = transformer_config(ModelConfig(), deterministic=True)
    assert config.activation_func is F.silu and config.gated_linear_unit and config.bias_activation_fusion
    assert (config.normalization, config.ffn_hidden_size, config.num_query_groups) == ("RMSNorm", 512, 4)
    assert config.params_dtype is torch.float32 and config.deterministic_mode


def test_gelu_without_bias_is_not_fused() -> None:
    assert not transformer_config(ModelConfig(activation=Activation.gelu)).bias_activation_fusion


@pytest.mark.parametrize(
    ("extras", "text"),
    [
        ({"attention_softmax_in_fp23": True}, r"model\.extras\.attention_softmax_in_fp23.*attention_softmax_in_fp32"),
        ({"num_layers": 3}, r"model\.extras\.num_layers: set by a key of its own"),
        ({"num_moe_experts": 4}, r"model\.extras\.num_moe_experts: .*dense"),
    ],
)
def test_wrong_extras_are_refused(extras: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transformer_config(ModelConfig(extras=extras))


def test_every_field_refused_as_not_built_exists_somewhere() -> None:
    """A field that a version lacks is refused as unknown; one that no version has would be a typo here."""
    with_19 = {"fused_residual_rmsnorm"}
    compat.check_fields(set(builder._NOT_BUILT) - with_19, "not built")


@on_cpu
def test_attention_on_a_machine_without_gpu() -> None:
    assert resolve_attention(ModelConfig()) is Attention.sdpa
    assert resolve_attention(ModelConfig(attention=Attention.unfused)) is Attention.unfused
    with pytest.raises(ValueError, match=r"model\.attention=te: this machine lacks a GPU"):
        resolve_attention(ModelConfig(attention=Attention.te))


def test_a_layer_has_the_modules_that_memory_plans_name(build: Callable[..., Any]) -> None:
    gpt = build(ModelConfig(num_layers=2, hidden_size=64))
    for layer in gpt.decoder.layers:
        names = {name for name, _ in layer.named_modules()}
        assert names >= {
            "input_layernorm",
            "pre_mlp_layernorm",
            "self_attention.linear_qkv",
            "self_attention.core_attention",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.activation",
            "mlp.linear_fc2",
        }
        assert all(layer.get_submodule(norm).weight.shape == (64,) for norm in ("input_layernorm", "pre_mlp_layernorm"))


@on_cpu
def test_learned_positions_dropout_and_untied_output_are_built(build: Callable[..., Any]) -> None:
    gpt = build(ModelConfig(position=Position.learned, hidden_dropout=0.5), vocab_size=250)
    assert gpt.embedding.position_embeddings.weight.shape == (128, 128)
    assert gpt.embedding.embedding_dropout.p == 0.5
    assert gpt.output_layer.weight.shape == gpt.embedding.word_embeddings.weight.shape == (256, 128)


def test_parameters_carry_tensor_parallel_attributes(build: Callable[..., Any]) -> None:
    gpt = build(ModelConfig(num_layers=1))
    assert all(hasattr(parameter, "tensor_model_parallel") for parameter in gpt.parameters())


@on_cpu
def test_building_and_running_says_nothing(
    build: Callable[..., Any], loss_of: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelConfig(num_layers=1, attention_dropout=0.1, hidden_dropout=0.1, seq_length=16)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", FutureWarning)
        loss_of(build(model)).backward()
    assert not caplog.records


@on_cpu
def test_rope_scaling_changes_the_frequencies(build: Callable[..., Any]) -> None:
    plain = build(ModelConfig(num_layers=1, rotary_base=500000, kv_channels=64))
    scaled = build(ModelConfig(num_layers=1, rotary_base=500000, kv_channels=64, rope_scaling_factor=32.0))
    ratio = plain.rotary_pos_emb.inv_freq / scaled.rotary_pos_emb.inv_freq
    # Fast frequencies stay, the slowest are divided by the factor (Llama 3.1's rule).
    assert ratio[0] == 1.0
    torch.testing.assert_close(ratio[-1].item(), 32.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [Attention.auto, Attention.sdpa, Attention.unfused])
def test_bf16_model_on_a_gpu(kind: Attention, build: Callable[..., Any], loss_of: Callable[..., torch.Tensor]) -> None:
    from megatron.core.transformer.module import Float16Module

    model = ModelConfig(num_layers=2, num_query_groups=2, seq_length=16, kv_channels=64)
    losses = []
    for attention in (kind, Attention.unfused):
        gpt = build(replace(model, attention=attention), bf16=True)
        wrapped = Float16Module(gpt.config, gpt)
        loss = loss_of(wrapped)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.is_cuda for p in gpt.parameters())
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
