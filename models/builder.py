"""From a ModelConfig to Megatron's TransformerConfig and GPTModel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from models import compat
from models.config import Attention, Layout, LossHead, ModelConfig, Position
from models.gpt import LossHeadGPT
from models.loss_head import resolve_loss_head
from models.spec import block_spec

#: fields that ask for modules or arithmetic that models/spec.py does not build
_NOT_BUILT = (
    "activation_func_clamp_value",
    "experimental_attention_variant",
    "fused_residual_rmsnorm",
    "glu_linear_offset",
    "layernorm_zero_centered_gamma",
    "mtp_num_layers",
    "multi_latent_attention",
    "num_moe_experts",
    "qk_layernorm",
    "use_te_activation_func",
)


def uses_transformer_engine() -> bool:
    """Whether models are built of Transformer Engine's modules: it is installed and there is a GPU."""
    return HAVE_TE and torch.cuda.is_available()


def resolve_attention(model: ModelConfig) -> Attention:
    """What `auto` means on this machine: te where Transformer Engine and a GPU are, else sdpa.

    Raises ValueError where te is asked for and cannot be had.
    """
    if model.attention is Attention.auto:
        return Attention.te if uses_transformer_engine() else Attention.sdpa
    if model.attention is Attention.te and not uses_transformer_engine():
        lacking = "Transformer Engine" if torch.cuda.is_available() else "a GPU"
        raise ValueError(f"model.attention=te: this machine lacks {lacking}; use model.attention=auto")
    return model.attention


def _shape(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "normalization": model.normalization.value,
        "layernorm_epsilon": model.layernorm_epsilon,
        "activation_func": F.silu if model.gated else F.gelu,
        "gated_linear_unit": model.gated,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.qkv_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "overlap_p2p_comm": layout.overlap_p2p_comm,
        "batch_p2p_comm": not layout.overlap_p2p_comm,
    }


def _ours_to_choose(model: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Fields that `model.extras` may override."""
    transformer_engine = uses_transformer_engine()
    return {
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        # Fused GELU exists with a bias only.
        "bias_activation_fusion": model.gated or model.bias,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": transformer_engine and model.position is Position.rope,
        # These three need Apex's or Megatron's own compiled extensions.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        # gloo may still be sending an output when overlapped sends return: freed, it arrives as rubbish
        "deallocate_pipeline_outputs": torch.cuda.is_available() or not layout.overlap_p2p_comm,
    }


def transformer_config(
    model: ModelConfig,
    layout: Layout = Layout(),
    *,
    bf16: bool = False,
    deterministic: bool = False,
    switches: Mapping[str, Any] = {},
) -> TransformerConfig:
    """Megatron's configuration of this model.

    `switches` are further fields (Megatron's own recompute and offload switches). With Transformer Engine,
    `deterministic` also needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment before that is imported.

    Raises ValueError for a field that the installed Megatron lacks, that the model's own keys set, or that asks for a
    module which this project does not build; and whatever TransformerConfig itself refuses.
    """
    compat.check_fields(model.extras, "model.extras")
    compat.check_fields(switches, "switches")
    dtype = torch.bfloat16 if bf16 else torch.float32
    fixed = {
        **_shape(model),
        **_layout(layout),
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "deterministic_mode": deterministic,
        **switches,
    }
    for name in model.extras:
        if name in fixed:
            raise ValueError(f"model.extras.{name}: set by a key of its own; use that one")
        if name in _NOT_BUILT:
            raise ValueError(f"model.extras.{name}: models have dense attention and MLP layers only")
    return compat.transformer_config({**_ours_to_choose(model, layout), **model.extras, **fixed})


def _stock_layer_spec(model: ModelConfig) -> Any:
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec()
    return get_gpt_layer_local_spec(normalization=model.normalization.value)


def build_gpt(
    model: ModelConfig,
    config: TransformerConfig,
    *,
    vocab_size: int,
    stock_spec: bool = False,
    layer: ModuleSpec | None = None,
) -> list[torch.nn.Module]:
    """This pipeline stage's model chunks (one, or one per virtual stage) on the current device, not yet wrapped.

    vocab_size is the tokenizer's, unpadded. stock_spec: Megatron's stock layers, as its users have them (attention is
    then Transformer Engine's, or unfused without it), and model.loss_head=auto means full. layer: the spec of every
    layer, instead of models.spec.layer_spec's. Needs initialised parallel groups and a seeded RNG tracker.
    """
    compat.apply()
    attention = resolve_attention(model)
    padded_vocab = model.padded_vocab_size(vocab_size, config.tensor_model_parallel_size)
    loss_head = resolve_loss_head(model, stock_spec)
    gpt_model = GPTModel if loss_head is LossHead.full else partial(LossHeadGPT, loss_head=loss_head)
    virtual = config.virtual_pipeline_model_parallel_size
    chunks: list[torch.nn.Module] = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        if stock_spec:
            spec = _stock_layer_spec(model)
        else:
            spec = block_spec(
                config, attention, transformer_engine=uses_transformer_engine(), vp_stage=vp_stage, layer=layer
            )
        chunk = gpt_model(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab,
            max_sequence_length=model.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type=model.position.value,
            rotary_base=model.rotary_base,
            rope_scaling=model.rope_scaling_factor is not None,
            rope_scaling_factor=model.rope_scaling_factor or 1.0,
            vp_stage=vp_stage,
        )
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        for parameter in chunk.parameters():
            # Gradient clipping counts each parameter once over the tensor-parallel group by these attributes.
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks
