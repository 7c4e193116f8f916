"""How many parameters a GPT has. Imports no torch."""

from __future__ import annotations

from models.config import ModelConfig, Normalization, Position


def parameter_count(model: ModelConfig, padded_vocab: int | None = None) -> int:
    """Parameters of the whole model over all ranks, tied weights once.

    padded_vocab: rows of the embedding; None: model.vocab_size, unpadded, as published counts have it.
    Raises ValueError where both are None.
    """
    vocab = model.vocab_size if padded_vocab is None else padded_vocab
    if vocab is None:
        raise ValueError("model.vocab_size: not set, so the size of the vocabulary must be given to count parameters")
    hidden, ffn = model.hidden_size, model.ffn
    fc1_width = 2 * ffn if model.gated else ffn
    qkv_width = model.query_width + 2 * model.kv_width
    norm = hidden if model.normalization is Normalization.rmsnorm else 2 * hidden
    weights = hidden * (qkv_width + model.query_width + fc1_width + ffn)
    biases = (hidden + fc1_width + hidden if model.bias else 0) + (qkv_width if model.bias or model.qkv_bias else 0)
    embeddings = vocab * hidden * (1 if model.tied_embeddings else 2)
    positions = model.seq_length * hidden if model.position is Position.learned else 0
    return embeddings + positions + model.num_layers * (weights + biases + 2 * norm) + norm
