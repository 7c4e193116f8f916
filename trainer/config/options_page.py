"""`python train.py options`: every memory option, what it means, and the bytes it is about. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from memory.sites import ABSENT_MODULES, INSIDE_REGION, OFFLOAD_MODULES, RECOMPUTE_MODULES, SITES, LayerShape, Module
from trainer.config.machine import Machine
from trainer.config.meanings import field_meanings, group_options
from trainer.config.schema import Config
from trainer.shape import layer_shape, plans_for_gpu

_MIB = 1 << 20


def options_page(config: Config, machine: Machine) -> Iterator[str]:
    """Lines of the page; sizes are those of the configured model."""
    shape = layer_shape(config, plans_for_gpu(config, machine.has_cuda))
    yield (
        f"Memory options. MiB: one layer of model={config.model.name}, "
        f"{shape.micro_batch_size} x {shape.seq_length} tokens, on one rank."
    )
    for group, modules in (("recompute", RECOMPUTE_MODULES), ("offload", OFFLOAD_MODULES)):
        yield ""
        yield f"{group}=OPTION"
        yield from _columns([(name, meaning) for name, meaning in group_options(group).items()])
        yield ""
        yield f"'{group}.modules=[NAME,NAME]'"
        yield from _columns([(name, *_mib(m, shape), m.means, _acts_on(m)) for name, m in modules.items()])
        yield ""
        yield f"{group}.KEY=VALUE"
        node = getattr(config, group)
        keys = [field.name for field in dataclasses.fields(node)]
        yield from _columns([(key, field_meanings()[type(node).__name__, key]) for key in keys])
    yield ""
    yield "Sites: the tensors that a layer keeps for backward, as plan files name them"
    yield from _columns(
        [(site.name, _size(site.bytes_of(shape)), site.holds, _remade(site.recompute)) for site in SITES.values()]
    )
    yield ""
    yield "Megatron's names that are refused"
    yield from _columns(list(ABSENT_MODULES.items()))


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _mib(module: Module, shape: LayerShape) -> tuple[str]:
    """Of all that the module names; inside a region, of what it leaves unkept."""
    names = module.sites or INSIDE_REGION[module.region]
    return (_size(sum(SITES[name].bytes_of(shape) for name in names)),)


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:>8.1f}" if nbytes else f"{'':>8}"


def _acts_on(module: Module) -> str:
    if module.region:
        return "nothing kept of " + ", ".join(INSIDE_REGION[module.region])
    return ", ".join(module.sites)


def _remade(cost: str) -> str:
    return f"made again by {cost}" if cost else ""
