"""Rules of the split over processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from models.config import Attention
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import at_least, divides, positive
from trainer.config.schema import Config


def model_parallel_size(config: Config) -> int:
    """Processes that hold one copy of the model (and of a sequence) together."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def data_parallel_size(config: Config, machine: Machine) -> int:
    """Copies of the model; before the processes are started, one."""
    return max(1, (machine.world_size or 1) // model_parallel_size(config))


def size_problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from at_least(
        config,
        1,
        "parallel.tensor",
        "parallel.pipeline",
        "parallel.virtual_pipeline",
        "parallel.context",
        "parallel.expert",
    )
    yield from positive(config, "parallel.timeout_s")


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    needed = model_parallel_size(config)
    if machine.world_size is not None and machine.world_size % needed:
        parallel = config.parallel
        yield ConfigError(
            "parallel",
            f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {needed} "
            f"does not divide the {machine.world_size} processes",
            f"Start a multiple of {needed} processes or choose other sizes",
        )
    yield from _tensor(config)
    yield from _pipeline(config)
    yield from _context(config, machine)
    if config.parallel.expert > 1:
        yield ConfigError("parallel.expert", "this model has no experts to share out", "Write parallel.expert=1")
    yield from _data(config)


def _tensor(config: Config) -> Iterator[ConfigError]:
    model, parallel = config.model, config.parallel
    tensor, context = parallel.tensor, parallel.context
    if tensor > 1:
        for key, value, why in (
            ("model.num_attention_heads", model.num_attention_heads, "each rank takes whole heads"),
            ("model.ffn_hidden_size", model.ffn, "each rank takes a share of the MLP"),
        ):
            yield from divides(key, value, "parallel.tensor", tensor, why)
        groups = model.query_groups
        if groups % tensor and tensor % groups:
            yield ConfigError(
                "model.num_query_groups",
                f"{groups} is neither a multiple nor a divisor of parallel.tensor={tensor}",
                f"Write a model.num_query_groups that is, such as {tensor}, or change parallel.tensor",
            )
    if parallel.sequence_parallel:
        if tensor == 1:
            yield ConfigError(
                "parallel.sequence_parallel",
                "it shares sequences over the tensor-parallel ranks, and there is one",
                "Add parallel.tensor=2 or more, or drop it",
            )
        elif model.seq_length % (tensor * context):
            yield from divides(
                "model.seq_length",
                model.seq_length,
                "parallel.tensor x parallel.context",
                tensor * context,
                "each rank takes an equal part of a sequence",
            )


def _pipeline(config: Config) -> Iterator[ConfigError]:
    parallel, layers = config.parallel, config.model.num_layers
    stages, virtual = parallel.pipeline, parallel.virtual_pipeline
    if virtual is None or stages == 1:
        yield from divides("model.num_layers", layers, "parallel.pipeline", stages, "each stage takes as many layers")
    else:
        yield from divides(
            "model.num_layers",
            layers,
            "parallel.pipeline x parallel.virtual_pipeline",
            stages * virtual,
            "each chunk takes as many layers",
        )
    if virtual is not None and stages == 1:
        yield ConfigError(
            "parallel.virtual_pipeline",
            "one stage has nothing to interleave",
            "Add parallel.pipeline=2 or more, or drop it",
        )
    if virtual is not None and stages == 2 and not parallel.overlap_p2p_comm:
        # only Megatron's argument parser refuses this; core trains on with wrong gradients
        yield ConfigError(
            "parallel.virtual_pipeline",
            "interleaving two stages gives wrong gradients unless their sends are overlapped",
            "Add parallel.overlap_p2p_comm=true",
        )
    if parallel.overlap_p2p_comm and virtual is None:
        yield ConfigError(
            "parallel.overlap_p2p_comm",
            "would do nothing: only the interleaved schedule overlaps its sends",
            "Add parallel.virtual_pipeline=2 or drop it",
        )


def _context(config: Config, machine: Machine) -> Iterator[ConfigError]:
    context = config.parallel.context
    if context == 1:
        return
    yield from divides(
        "model.seq_length",
        config.model.seq_length,
        "2 x parallel.context",
        2 * context,
        "each rank takes two parts of a sequence, an early and a late one",
    )
    if config.model.attention in (Attention.sdpa, Attention.unfused):
        yield ConfigError(
            "parallel.context",
            f"model.attention={config.model.attention.name} sees one rank's part only",
            "Write model.attention=te",
        )
    elif not (machine.has_te and machine.has_cuda):
        yield ConfigError(
            "parallel.context",
            f"it needs a GPU with Transformer Engine: {machine.lacking()}",
            "Write parallel.context=1",
        )


def _data(config: Config) -> Iterator[ConfigError]:
    parallel = config.parallel
    if parallel.overlap_param_gather:
        for key, on in (
            ("distributed_optimizer", parallel.distributed_optimizer),
            ("overlap_grad_reduce", parallel.overlap_grad_reduce),
        ):
            if not on:
                yield ConfigError(
                    "parallel.overlap_param_gather", f"needs parallel.{key}", f"Add parallel.{key}=true or drop it"
                )
