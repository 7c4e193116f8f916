"""Norms for runs without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class TorchNorm:
    """torch's LayerNorm or RMSNorm by `config.normalization`, called as Megatron calls a norm builder.

    Megatron's own WrappedTorchNorm is the same module but refuses sequence parallelism; marking the weights is all that
    needs, since finalize_model_grads sums the gradients of marked parameters over the tensor-parallel group.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm: Any = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
