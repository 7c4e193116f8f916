"""Core attention by torch's scaled_dot_product_attention: no S x S scores are kept where torch has a fused kernel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


class SdpaCoreAttention(MegatronModule):
    """Causal self-attention core; takes the place, and the constructor arguments, of Megatron's DotProductAttention.

    On the CPU torch has no fused kernel with dropout: with attention dropout in training, scores are kept after all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"model.attention=sdpa: only causal masks, not {attn_mask_type}")
        if config.context_parallel_size > 1:
            raise ValueError("model.attention=sdpa: context parallelism needs model.attention=te (Transformer Engine)")
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError("model.attention=sdpa: windows and softmax variants need model.attention=te")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [s, b, heads, dim], key and value [s, b, groups, dim] -> [s, b, heads x dim]; always causal."""
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("model.attention=sdpa: packed sequences and attention biases need model.attention=te")
        dropout = self.dropout if self.training else 0.0
        # As in DotProductAttention: each tensor-parallel rank has other heads, so it draws from a stream of its own.
        draws_own = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws_own else nullcontext():
            context = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                dropout_p=dropout,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return context.permute(2, 0, 1, 3).flatten(2)
