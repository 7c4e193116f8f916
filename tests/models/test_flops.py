"""FLOPs of a token against numbers worked out by hand."""

from __future__ import annotations

from models.config import Activation, ModelConfig
from models.flops import FlopsPerToken, flops_per_token


def test_every_term_of_a_small_gqa_swiglu_model() -> None:
    model = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=20)
    assert flops_per_token(model, padded_vocab=100, seq_length=10) == FlopsPerToken(
        mlp=8_640,  # 3 layers x 6 x (8 x 20) x 3 matrices
        attention_linear=3_456,  # 3 x 6 x 8 x (8 query + 4 key + 4 value + 8 output)
        attention_core=1_440,  # 3 x 6 x 8 x 10 positions x 2 products / 2 for causality
        logits=4_800,  # 6 x 8 x 100
    )
    assert flops_per_token(model, padded_vocab=100, seq_length=10).total == 18_336


def test_heads_wider_than_the_hidden_size_and_a_plain_mlp() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, kv_channels=6, activation=Activation.gelu)
    assert flops_per_token(model, padded_vocab=1, seq_length=4) == FlopsPerToken(
        mlp=3_072,  # 6 x (8 x 32) x 2
        attention_linear=2_304,  # 6 x 8 x (12 x 4)
        attention_core=288,  # 6 x 12 x 4
        logits=48,
    )


def test_llama3_8b_at_8192_tokens() -> None:
    model = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8
    )
    flops = flops_per_token(model, padded_vocab=128256, seq_length=8192)
    # 6 x (parameters of all matrices but the embedding: 7,504,658,432) + 6 x 32 x 4096 x 8192
    assert flops.total == 45_027_950_592 + 6_442_450_944
