"""Rules of offloading that hold for both engines. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from memory.options import OffloadKind
from memory.sites import ABSENT_MODULES, OFFLOAD_MODULES, RECOMPUTE_MODULES
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import at_least, module_names, unused
from trainer.config.schema import Config


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    options = config.offload
    yield from module_names("offload.modules", options.modules, OFFLOAD_MODULES, ABSENT_MODULES, RECOMPUTE_MODULES)
    yield from at_least(config, 0, "offload.min_bytes")
    if options.weights:
        yield ConfigError(
            "offload.weights",
            "weights stay on the device: only activations are offloaded",
            "Write offload.weights=false",
        )
    if options.kind is not OffloadKind.layerwise:
        reason = "nothing is offloaded" if options.kind is OffloadKind.none else "it goes by module, not by layer"
        yield from unused(
            config, reason, "Add offload=layerwise or drop it", "offload.num_layers", "offload.double_buffering"
        )
    if options.kind is not OffloadKind.fine_grained:
        reason = "nothing is offloaded" if options.kind is OffloadKind.none else "it takes all that a layer saves"
        yield from unused(config, reason, "Add offload=fine_grained or drop it", "offload.modules")
        if options.fraction != 1.0:
            yield ConfigError("offload.fraction", f"would do nothing: {reason}", "Add offload=fine_grained or drop it")
    elif not 0 < options.fraction <= 1:
        yield ConfigError(
            "offload.fraction",
            f"{options.fraction} is not a share above 0 and up to 1",
            "Write for instance offload.fraction=0.5, or offload=none",
        )
    if options.kind is OffloadKind.layerwise:
        yield from _layerwise(config)
    elif not options.activations:
        yield ConfigError(
            "offload.activations", "belongs to offload=layerwise", "Write offload=none to keep everything"
        )


def _layerwise(config: Config) -> Iterator[ConfigError]:
    options, parallel = config.offload, config.parallel
    if not options.activations:
        yield ConfigError(
            "offload.activations", "false leaves nothing to offload", "Write offload.activations=true or offload=none"
        )
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    if config.model.num_layers % chunks:
        return
    layers = config.model.num_layers // chunks
    of = "the model" if chunks == 1 else "each model chunk"
    if layers == 1:
        yield ConfigError(
            "offload",
            f"{of} has one layer, which backward needs at once",
            "Write offload=fine_grained, or give it two layers or more",
        )
    elif options.num_layers is not None and not 1 <= options.num_layers < layers:
        yield ConfigError(
            "offload.num_layers",
            f"{options.num_layers} is out of range: {of} has {layers} layers, and backward needs the last at once",
            "Write offload.num_layers=1, or offload=none"
            if layers == 2
            else f"Write a number from 1 to {layers - 1}, or offload=none",
        )
