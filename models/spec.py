"""Megafit's transformer layer, as a Megatron spec: every norm a module of its own, and the activation one too.

With Transformer Engine, Megatron's stock spec fuses norms into the linear layers (TELayerNormColumnParallelLinear),
where their outputs can be neither dropped nor recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from models.attention import SdpaCoreAttention
from models.config import Attention
from models.mlp import ExposedMLP
from models.norm import TorchNorm


@dataclass(frozen=True)
class _Modules:
    norm: Any
    column: Any
    row: Any


_LOCAL = _Modules(TorchNorm, ColumnParallelLinear, RowParallelLinear)
#: can be named without Transformer Engine, and built with it
_TRANSFORMER_ENGINE = _Modules(TENorm, TEColumnParallelLinear, TERowParallelLinear)

_CORE_ATTENTION = {
    Attention.sdpa: SdpaCoreAttention,
    Attention.unfused: DotProductAttention,
    Attention.te: TEDotProductAttention,
}


def layer_spec(attention: Attention, *, transformer_engine: bool) -> ModuleSpec:
    """Spec of one layer; `attention` is resolved (not auto), `transformer_engine` picks TE's linear layers and norms.

    The keys of a checkpoint are those of Megatron's stock specs, so that checkpoints go either way.
    """
    modules = _TRANSFORMER_ENGINE if transformer_engine else _LOCAL
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=modules.column,
                    core_attention=_CORE_ATTENTION[attention],
                    linear_proj=modules.row,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=ModuleSpec(
                module=ExposedMLP, submodules=MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(
    config: TransformerConfig,
    attention: Attention,
    *,
    transformer_engine: bool,
    vp_stage: int | None,
    layer: ModuleSpec | None = None,
) -> TransformerBlockSubmodules:
    """Spec of this pipeline stage's (chunk's) layers, ours unless `layer` is another one, and of the final norm."""
    layer = layer or layer_spec(attention, transformer_engine=transformer_engine)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage),
        layer_norm=(_TRANSFORMER_ENGINE if transformer_engine else _LOCAL).norm,
    )
