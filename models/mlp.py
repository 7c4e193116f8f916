"""Megatron's MLP with its activation as a module, so that what goes in and comes out can be seen and remade."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule


class Activation(MegatronModule):
    """The middle of Megatron's MLP.forward: bias, then SwiGLU or GELU, by the same fused or plain path."""

    def forward(self, fc1_out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """fc1_out [s, b, ffn] (SwiGLU: [s, b, 2 x ffn], gate first), bias of its last dimension -> [s, b, ffn]."""
        gated = self.config.gated_linear_unit
        out: torch.Tensor
        if self.config.bias_activation_fusion:
            if gated:
                out = bias_swiglu_impl(fc1_out, bias, self.config.activation_func_fp8_input_store)
            else:
                out = bias_gelu_impl(fc1_out, bias)
            return out
        biased = fc1_out if bias is None else fc1_out + bias
        if gated:
            gate, linear = torch.chunk(biased, 2, dim=-1)
            out = self.config.activation_func(gate) * linear
        else:
            out = self.config.activation_func(biased)
        return out


class ExposedMLP(MLP):
    """MLP whose `activation` is a submodule between `linear_fc1` and `linear_fc2`; the same result to the last bit."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        **kwargs: Any,
    ) -> None:
        """0.19's TransformerLayer passes pg_collection, is_mtp_layer and (kwargs) name; 0.16.1's passes none."""
        tp_group = pg_collection.tp if pg_collection else parallel_state.get_tensor_model_parallel_group()
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group, **kwargs)
        self.activation = Activation(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s, b, h] -> ([s, b, h], bias still to be added, or None)."""
        fc1_out, fc1_bias = self.linear_fc1(hidden_states)
        out, bias = self.linear_fc2(self.activation(fc1_out, fc1_bias))
        return out, bias
