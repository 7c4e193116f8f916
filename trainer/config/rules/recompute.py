"""Rules of recomputation that hold for both engines. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from memory.options import Granularity, Method
from memory.sites import ABSENT_MODULES, INSIDE_REGION, OFFLOAD_MODULES, RECOMPUTE_MODULES
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import module_names, unused
from trainer.config.schema import Config


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    options = config.recompute
    yield from module_names("recompute.modules", options.modules, RECOMPUTE_MODULES, ABSENT_MODULES, OFFLOAD_MODULES)
    if options.granularity is Granularity.none:
        yield from unused(config, "nothing is recomputed", "Add recompute=selective or drop it", "recompute.modules")
        yield from unused(
            config,
            "nothing is recomputed",
            "Add recompute=full or drop it",
            "recompute.method",
            "recompute.num_layers",
            "recompute.distribute_saved_activations",
        )
    elif options.granularity is Granularity.selective:
        yield from unused(
            config,
            "recompute=selective acts on modules of every layer",
            "Write recompute=full or drop it",
            "recompute.method",
            "recompute.num_layers",
            "recompute.distribute_saved_activations",
        )
        yield from _inside_mlp(config)
    else:
        yield from unused(
            config, "recompute=full re-runs whole layers", "Write recompute=selective or drop it", "recompute.modules"
        )
        yield from _full(config)


def _inside_mlp(config: Config) -> Iterator[ConfigError]:
    names = config.recompute.modules or []
    for name in names:
        module = RECOMPUTE_MODULES.get(name)
        if module and module.sites and "mlp" in names and set(module.sites) <= set(INSIDE_REGION["mlp"]):
            yield ConfigError("recompute.modules", f"mlp re-runs all of the MLP, {name} with it", f"Drop {name} or mlp")


def _full(config: Config) -> Iterator[ConfigError]:
    options, parallel = config.recompute, config.parallel
    if options.method is None:
        yield ConfigError(
            "recompute.method",
            "recompute=full needs a method",
            f"Choices: {', '.join(method.name for method in Method)}",
        )
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    most = config.model.num_layers // chunks
    layers = "layers" if chunks == 1 else "layers of each model chunk"
    if options.num_layers is None:
        yield ConfigError(
            "recompute.num_layers", "recompute=full needs a number of layers", "Write recompute.num_layers=1"
        )
    elif options.num_layers < 1 or (most < options.num_layers and config.model.num_layers % chunks == 0):
        means = "layers that are re-run as one" if options.method is Method.uniform else "first layers that are re-run"
        yield ConfigError(
            "recompute.num_layers",
            f"{options.num_layers} is out of range: it counts the {means}, among {most} {layers}",
            f"Write a number from 1 to {most}",
        )
    if options.distribute_saved_activations:
        if parallel.tensor == 1:
            yield ConfigError(
                "recompute.distribute_saved_activations",
                "there is one tensor-parallel rank, so nothing to share out",
                "Add parallel.tensor=2 or more, or drop it",
            )
        if parallel.sequence_parallel:
            yield ConfigError(
                "recompute.distribute_saved_activations",
                "parallel.sequence_parallel shares these tensors out already",
                "Write parallel.sequence_parallel=false or drop it",
            )
