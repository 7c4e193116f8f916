"""FLOPs of training a GPT, by Megatron's formula (num_floating_point_operations). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig

#: a multiply-add is two operations; each weight is used in forward, in the input's gradient and in its own gradient
_FORWARD_AND_BACKWARD = 2 * 3


@dataclass(frozen=True)
class FlopsPerToken:
    """Model FLOPs of forward and backward for one token, by part; a third of each is forward.

    Counts matrix products only, not recomputation, norms, embeddings or the optimizer: the numerator of MFU.
    """

    mlp: int
    #: qkv and output projections
    attention_linear: int
    #: scores and their product with the values, over the causal half
    attention_core: int
    logits: int

    @property
    def total(self) -> int:
        return self.mlp + self.attention_linear + self.attention_core + self.logits


def flops_per_token(model: ModelConfig, padded_vocab: int, seq_length: int) -> FlopsPerToken:
    """FLOPs for one token of a sequence of seq_length, averaged over its positions."""
    layers = _FORWARD_AND_BACKWARD * model.num_layers
    hidden = model.hidden_size
    return FlopsPerToken(
        mlp=layers * hidden * model.ffn * (3 if model.gated else 2),
        attention_linear=layers * hidden * (2 * model.query_width + 2 * model.kv_width),
        attention_core=layers * model.query_width * seq_length,
        logits=_FORWARD_AND_BACKWARD * hidden * padded_vocab,
    )
