"""From files to micro-batches: tokenizers, corpora, Megatron's samples, and batches by position."""
