"""Thresholds on what a run measures of itself, and what to type when one is passed. Pure; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memory.options import Granularity, OffloadKind
from memory.sites import OFFLOAD_MODULES, RECOMPUTE_MODULES
from trainer.config.schema import Config, GuardConfig, PlanSource
from trainer.report.observer import Advice
from trainer.report.units import change_text, percent_text

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Observation:
    """Shares of 1, of the worst rank where ranks differ. None: not known here."""

    #: allocated at the peak, of the device's memory
    peak: float | None = None
    #: of the reserved memory at the peak, what nobody uses
    unused_reserved: float | None = None
    #: of what the link carries in forward (out) or backward (back), what the copies need
    link: float | None = None
    #: of the host memory that offloading may take, what it has taken
    host: float | None = None
    #: of the baseline's MFU, what is lost
    mfu_drop: float | None = None
    #: backward time over the baseline's
    backward: float | None = None
    #: FLOPs done again, of the model's
    recomputed_flops: float = 0.0
    #: recomputed module -> (what it frees of all that would be kept, its FLOPs of the model's)
    modules: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def advise(config: Config, seen: Observation) -> list[Advice]:
    """One advice for each threshold that is passed, in the order of `guard`."""
    return [advice for check in _CHECKS for advice in check(config, config.guard, seen)]


def _passed(value: float | None, threshold: float | None) -> bool:
    return value is not None and threshold is not None and value > threshold


def _peak(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if _passed(seen.peak, guard.peak):
        yield Advice(
            "peak", f"the peak takes {percent_text(seen.peak)} of the device's memory", _save_more(config, seen)
        )


def _unused_reserved(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if _passed(seen.unused_reserved, guard.unused_reserved):
        yield Advice(
            "unused_reserved",
            f"{percent_text(seen.unused_reserved)} of the memory that the allocator holds is unused at the peak",
            f"set {_ALLOCATOR} in the environment",
        )


def _link(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if seen.link is not None and guard.link is not None and seen.link > guard.link:
        yield Advice(
            "link",
            f"copies need {percent_text(seen.link)} of what the link carries beside forward or backward",
            _copy_less(config, guard.link / seen.link),
        )


def _host(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if seen.host is not None and guard.host is not None and seen.host > guard.host:
        yield Advice(
            "host",
            f"offloading has taken {percent_text(seen.host)} of the host memory that it may take",
            f"raise offload.host_limit_gib, or {_copy_less(config, guard.host / seen.host)}",
        )


def _mfu_drop(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if _passed(seen.mfu_drop, guard.mfu_drop):
        remedy = _cost_less(config, seen)
        yield Advice("mfu_drop", f"MFU is {percent_text(seen.mfu_drop)} below the baseline's", remedy)


def _backward(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if _passed(seen.backward, guard.backward):
        remedy = _cost_less(config, seen)
        yield Advice("backward", f"backward takes {change_text(seen.backward)} over the baseline's", remedy)


def _recomputed_flops(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if _passed(seen.recomputed_flops, guard.recomputed_flops):
        yield Advice(
            "recomputed_flops",
            f"backward does {percent_text(seen.recomputed_flops)} of the model's FLOPs again",
            _recompute_less(config, seen),
        )


def _module(config: Config, guard: GuardConfig, seen: Observation) -> Iterator[Advice]:
    if guard.module_saves is None:
        return
    for name, (saves, costs) in seen.modules.items():
        if saves < guard.module_saves and costs > guard.module_costs:
            freed, paid = percent_text(saves), percent_text(costs)
            problem = f"recomputing {name} frees {freed} of what would be kept, for {paid} more FLOPs"
            yield Advice("module_saves", problem, _without(config, seen, name))


_CHECKS: Sequence[Callable[[Config, GuardConfig, Observation], Iterator[Advice]]] = (
    _peak,
    _unused_reserved,
    _link,
    _host,
    _mfu_drop,
    _backward,
    _recomputed_flops,
    _module,
)


def _of_options(config: Config) -> bool:
    return config.plan.source is PlanSource.options


def _save_more(config: Config, seen: Observation) -> str:
    recompute, offload = config.recompute, config.offload
    if not _of_options(config):
        return "let the plan offload or recompute more, fc1_out first"
    if offload.kind is OffloadKind.none:
        return "offload=fine_grained"
    if recompute.granularity is Granularity.none:
        return "recompute=selective"
    if offload.kind is OffloadKind.fine_grained and offload.fraction < 1:
        return f"offload.fraction={min(1.0, offload.fraction + 0.25):g}"
    if offload.kind is OffloadKind.fine_grained and offload.modules is not None:
        missing = [name for name in reversed(list(OFFLOAD_MODULES)) if name not in offload.modules]
        if missing:
            return _list_text("offload.modules", [*offload.modules, missing[0]])
    if offload.kind is OffloadKind.layerwise and offload.num_layers is not None:
        most = config.model.num_layers // config.parallel.pipeline - 1
        if offload.num_layers < most:
            return f"offload.num_layers={min(most, offload.num_layers + max(1, most // 4))}"
    if recompute.granularity is Granularity.selective and "mlp_fc1" not in (recompute.modules or ()):
        return _list_text("recompute.modules", [*_recomputed_names(config, seen), "mlp_fc1"])
    if recompute.granularity is not Granularity.full:
        return "recompute=full recompute.modules=null"
    return f"trainer.micro_batch_size={max(1, config.trainer.micro_batch_size // 2)}"


def _copy_less(config: Config, factor: float) -> str:
    """Offload only `factor` of the bytes."""
    offload = config.offload
    if not _of_options(config):
        return "let the plan offload fewer sites or layers"
    if offload.kind is OffloadKind.layerwise:
        if not offload.double_buffering:
            return "offload.double_buffering=true"
        layers = config.model.num_layers - 1 if offload.num_layers is None else offload.num_layers
        return f"offload.num_layers={max(1, math.floor(layers * factor))}"
    if offload.kind is OffloadKind.fine_grained:
        if offload.modules is not None and len(offload.modules) > 1:
            return _list_text("offload.modules", offload.modules[:-1])
        return f"offload.fraction={max(0.05, math.floor(offload.fraction * factor * 20) / 20):g}"
    return "offload=none"


def _cost_less(config: Config, seen: Observation) -> str:
    """Less of what takes time: products done again before copies, these before norms and activations."""
    copies = config.offload.kind is not OffloadKind.none or not _of_options(config)
    return _copy_less(config, 0.5) if copies and not seen.recomputed_flops else _recompute_less(config, seen)


def _recompute_less(config: Config, seen: Observation) -> str:
    if not _of_options(config):
        return "let the plan recompute fewer layers, matrix products first"
    if config.recompute.granularity is Granularity.full:
        return "recompute=selective recompute.method=null recompute.num_layers=null"
    dearest = max(seen.modules, key=lambda name: seen.modules[name][1], default=None)
    return "recompute=none recompute.modules=null" if dearest is None else _without(config, seen, dearest)


def _without(config: Config, seen: Observation, name: str) -> str:
    if not _of_options(config):
        return f"let the plan keep what {name} recomputes"
    rest = [other for other in _recomputed_names(config, seen) if other != name]
    return _list_text("recompute.modules", rest) if rest else "recompute=none recompute.modules=null"


def _recomputed_names(config: Config, seen: Observation) -> list[str]:
    """The modules that selective recomputation acts on, in the catalogue's order."""
    names = config.recompute.modules
    if names is None:
        return [name for name in RECOMPUTE_MODULES if name in ("layernorm", "mlp_act", *seen.modules)]
    return list(names)


def _list_text(key: str, names: Sequence[str]) -> str:
    return f"'{key}=[{','.join(names)}]'"
