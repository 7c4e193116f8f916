"""Rules of the model's shape. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from models.config import Attention, Position
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.megatron_fields import transformer_config_fields
from trainer.config.rules.common import at_least, divides, positive, share
from trainer.config.schema import Config
from trainer.config.suggest import RENAMED, leaf_types, nearest


def size_problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from at_least(
        config,
        1,
        "model.num_layers",
        "model.hidden_size",
        "model.ffn_hidden_size",
        "model.num_attention_heads",
        "model.num_query_groups",
        "model.kv_channels",
        "model.seq_length",
        "model.vocab_size",
        "model.make_vocab_size_divisible_by",
        "model.rotary_base",
    )
    yield from positive(config, "model.layernorm_epsilon", "model.init_method_std", "model.rope_scaling_factor")
    yield from share(config, "model.attention_dropout", "model.hidden_dropout")


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    model = config.model
    heads, groups = model.num_attention_heads, model.query_groups
    if model.kv_channels is None:
        yield from divides(
            "model.hidden_size", model.hidden_size, "model.num_attention_heads", heads, "each head has an equal share"
        )
    if heads % groups:
        fitting = [count for count in range(1, heads + 1) if heads % count == 0]
        yield ConfigError(
            "model.num_query_groups",
            f"{groups} groups do not share {heads} heads (model.num_attention_heads) evenly",
            f"Choices: {', '.join(map(str, fitting))}",
        )
    if model.position is Position.rope and model.head_dim % 2:
        yield ConfigError(
            "model.kv_channels",
            f"rotary embeddings turn pairs, and a head is {model.head_dim} wide",
            "Write an even model.kv_channels or model.position=learned",
        )
    if model.rope_scaling_factor is not None and model.position is not Position.rope:
        yield ConfigError(
            "model.rope_scaling_factor", "would do nothing: positions are learned", "Add model.position=rope or drop it"
        )
    if model.attention is Attention.te and not (machine.has_te and machine.has_cuda):
        yield ConfigError(
            "model.attention",
            f"te needs a GPU with Transformer Engine: {machine.lacking()}",
            "Write model.attention=auto or sdpa",
        )
    yield from _extras_problems(config)


def _extras_problems(config: Config) -> Iterator[ConfigError]:
    fields = transformer_config_fields()
    for name in config.model.extras:
        key = f"model.extras.{name}"
        ours = f"model.{name}" if f"model.{name}" in leaf_types() else RENAMED.get(name)
        if ours:
            yield ConfigError(key, "is set by a key of its own", f"Write {ours}=...")
        elif fields and name not in fields:
            near = nearest(name, fields)
            remedy = f"Did you mean {near}?" if near else "Look through the fields of Megatron's TransformerConfig"
            yield ConfigError(key, f"Megatron's TransformerConfig has no field {name}", remedy)
