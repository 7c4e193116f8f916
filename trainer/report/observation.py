"""From an interval to what the guard looks at. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from memory.plan import LayerPlan, Plan, keep_plan
from memory.sites import RECOMPUTE_MODULES, LayerShape
from trainer.report.guard import Observation
from trainer.report.metrics import peak_device_share
from trainer.report.observer import Copies, Interval, RankUse


def observe(interval: Interval, flops_per_token: float, freed: Mapping[str, float]) -> Observation:
    """freed: recomputed module -> what it frees of all that would be kept (freed_shares)."""
    again = {_module_of(name): cost / flops_per_token for name, cost in interval.recomputed_flops_per_token.items()}
    change = interval.delta
    return Observation(
        peak=peak_device_share(interval),
        unused_reserved=_largest(_unused(rank) for rank in interval.ranks),
        link=_link(interval.copies, interval.ranks[0]),
        host=_largest(_host(rank) for rank in interval.ranks),
        mfu_drop=change.mfu_drop if change else None,
        backward=change.backward if change else None,
        recomputed_flops=sum(again.values()),
        modules={name: (freed[name], again.get(name, 0.0)) for name in freed},
    )


def freed_shares(plan: Plan, shape: LayerShape) -> dict[str, float]:
    """What each recomputed module frees of all that plan keep keeps, by the catalogue's closed forms; not of spans."""
    layers = range(len(plan.layers))
    kept, everything = plan.kept_bytes(shape, layers), keep_plan(len(plan.layers)).kept_bytes(shape, layers)
    names = {name for layer in plan.layers for name in (*layer.recompute, *layer.regions)}
    shares: dict[str, float] = {}
    for name in sorted(names):
        without = replace(plan, layers=tuple(_without(layer, name) for layer in plan.layers))
        module = _module_of(name)
        shares[module] = shares.get(module, 0.0) + (without.kept_bytes(shape, layers) - kept) / everything
    return shares


def _module_of(name: str) -> str:
    """The first module of the catalogue that recomputes this site or region; "layer" is none."""
    return next((module.name for module in RECOMPUTE_MODULES.values() if name in (*module.sites, module.region)), name)


def _without(layer: LayerPlan, name: str) -> LayerPlan:
    return replace(layer, recompute=layer.recompute - {name}, regions=layer.regions - {name})


def _unused(rank: RankUse) -> float | None:
    if rank.peak_reserved_bytes is None or rank.peak_allocated_bytes is None:
        return None
    return 1 - rank.peak_allocated_bytes / rank.peak_reserved_bytes


def _host(rank: RankUse) -> float | None:
    """Only a GPU needs page-locked memory, which alone is limited."""
    return rank.host_pool_bytes / rank.host_limit_bytes if rank.device_bytes and rank.host_limit_bytes else None


def _link(copies: Copies | None, rank: RankUse) -> float | None:
    """Without a GPU copies hide behind nothing, so that there is nothing to fill."""
    if copies is None or rank.device_bytes is None:
        return None
    out = copies.out_bytes / (copies.link_out_bytes_per_s * rank.forward_s)
    return max(out, copies.back_bytes / (copies.link_back_bytes_per_s * rank.backward_s))


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
