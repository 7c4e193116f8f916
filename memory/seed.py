"""From the seed options (recompute, offload) to a plan, and what to say about the options that did not get into it.

Pure and free of torch. Recompute goes before offload where both name a site: bytes that are never kept need no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import Action, LayerPlan, Plan, keep_plan
from memory.sites import INSIDE_REGION, OFFLOAD_MODULES, RECOMPUTE_MODULES, SITES, LayerShape


@dataclass(frozen=True)
class Request:
    """One option as a user named it: the first step must show layers and bytes on which it acted."""

    action: Action
    #: the module's name, or full / layerwise
    name: str
    sites: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()
    #: why it may have acted on nothing, as far as the options alone tell
    doubt: str = ""


@dataclass(frozen=True)
class Seed:
    plan: Plan
    requests: tuple[Request, ...]
    #: what was chosen or left out without being asked, and why
    notes: tuple[str, ...]


def seed_plan(
    recompute: RecomputeOptions, offload: OffloadOptions, shape: LayerShape, chunks: Sequence[Sequence[int]]
) -> Seed:
    """Make a plan of the options.

    chunks: the layers (numbered over the whole model) of each pipeline stage's model chunks, in forward order;
    options that count layers count within each chunk, as Megatron does.
    """
    num_layers = sum(len(chunk) for chunk in chunks)
    seed = Seed(keep_plan(num_layers), (), ())
    if recompute.granularity is Granularity.selective:
        seed = _selective(seed, recompute, shape)
    elif recompute.granularity is Granularity.full:
        seed = _full(seed, recompute, chunks)
    if offload.kind is OffloadKind.fine_grained:
        seed = _fine_grained(seed, offload, shape, chunks)
    elif offload.kind is OffloadKind.layerwise:
        seed = _layerwise(seed, offload, chunks)
    return seed


def _selective(seed: Seed, options: RecomputeOptions, shape: LayerShape) -> Seed:
    names, notes = options.modules, list(seed.notes)
    if names is None:
        names = ["layernorm", "mlp_act"] + ([] if shape.fused_attention else ["core_attn"])
        notes.append(
            f"recompute.modules: chose {', '.join(names)}: element-wise, so nearly free"
            + ("" if shape.fused_attention else "; core_attn since unfused attention stores S x S scores")
        )
        if shape.fused_attention:
            notes.append(
                "recompute.modules: left out core_attn: fused attention stores no scores, so it would free "
                "next to nothing for one more attention forward"
            )
        notes.append("recompute.modules: left out mlp_fc1 and mlp: they repeat matrix products")
    modules = [RECOMPUTE_MODULES[name] for name in names]
    regions = frozenset(module.region for module in modules if module.region)
    inside = frozenset(site for region in regions for site in INSIDE_REGION[region])
    sites = frozenset(site for module in modules for site in module.sites) - inside
    layer = LayerPlan(recompute=sites, regions=regions)
    requests = [
        Request(
            Action.recompute,
            module.name,
            frozenset(module.sites),
            frozenset({module.region} if module.region else ()),
            doubt=f"recompute.modules has mlp, which re-runs all of {module.name}"
            if module.sites and set(module.sites) <= inside
            else "",
        )
        for module in modules
    ]
    if "core_attn" in names and shape.fused_attention:
        notes.append(
            "recompute.modules=core_attn: attention is fused and stores no scores: this frees next to nothing "
            "and costs one attention forward a layer; drop it or use model.attention=unfused"
        )
    plan = replace(seed.plan, layers=(layer,) * len(seed.plan.layers))
    return Seed(plan, (*seed.requests, *requests), tuple(notes))


def _full(seed: Seed, options: RecomputeOptions, chunks: Sequence[Sequence[int]]) -> Seed:
    count = options.num_layers or 1
    spans: list[tuple[int, int]] = []
    for chunk in chunks:
        first, past = chunk[0], chunk[-1] + 1
        if options.method is Method.block:
            spans += [(layer, layer + 1) for layer in range(first, min(first + count, past))]
        else:
            spans += [(start, min(start + count, past)) for start in range(first, past, count)]
    plan = replace(seed.plan, spans=tuple(spans), distribute_saved_activations=options.distribute_saved_activations)
    request = Request(Action.recompute, "full", regions=frozenset({"layer"}))
    return Seed(plan, (*seed.requests, request), seed.notes)


def _fine_grained(seed: Seed, options: OffloadOptions, shape: LayerShape, chunks: Sequence[Sequence[int]]) -> Seed:
    names = list(OFFLOAD_MODULES) if options.modules is None else options.modules
    wanted = _ordered(site for name in names for site in OFFLOAD_MODULES[name].sites)
    small = {site for site in wanted if SITES[site].bytes_of(shape) < options.min_bytes}
    layers = list(seed.plan.layers)
    for chunk in chunks:
        possible = [
            (number, site)
            for number in chunk
            for site in wanted
            if site not in small and _kept(seed.plan, number, site)
        ]
        budget = options.fraction * sum(SITES[site].bytes_of(shape) for _, site in possible)
        for number, site in possible:
            budget -= SITES[site].bytes_of(shape)
            if budget < -1e-6:
                break
            layers[number] = replace(layers[number], offload=layers[number].offload | {site})
    plan = replace(seed.plan, layers=tuple(layers), min_offload_bytes=options.min_bytes)
    requests, notes = [], list(seed.notes)
    for name in names:
        sites = frozenset(OFFLOAD_MODULES[name].sites)
        doubt = _why_not(plan, sites, small, options)
        if doubt and options.modules is None:
            notes.append(f"offload.modules: left out {name}: {doubt}")
        else:
            requests.append(Request(Action.offload, name, sites, doubt=doubt))
    if not requests:
        # Each module was left out for a reason of its own; that none is left must not pass as a choice.
        everything = frozenset(site for name in names for site in OFFLOAD_MODULES[name].sites)
        doubt = _why_not(plan, everything, small, options)
        requests.append(Request(Action.offload, "fine_grained", everything, doubt=doubt))
    return Seed(plan, (*seed.requests, *requests), tuple(notes))


def _layerwise(seed: Seed, options: OffloadOptions, chunks: Sequence[Sequence[int]]) -> Seed:
    layers = list(seed.plan.layers)
    for chunk in chunks:
        count = len(chunk) - 1 if options.num_layers is None else options.num_layers
        for number in chunk[:count]:
            sites = frozenset(site for site in SITES if _kept(seed.plan, number, site))
            layers[number] = replace(layers[number], offload=sites)
    plan = replace(
        seed.plan,
        layers=tuple(layers),
        min_offload_bytes=options.min_bytes,
        reload_ahead=1 if options.double_buffering else 0,
    )
    request = Request(
        Action.offload,
        "layerwise",
        frozenset(SITES),
        doubt="" if not plan.idle else "offload.num_layers leaves no layer to offload",
    )
    return Seed(plan, (*seed.requests, request), seed.notes)


def _kept(plan: Plan, number: int, site: str) -> bool:
    """Whether this layer's tensor would stay on the device under the plan made so far."""
    span = plan.span_of(number)
    if span is not None:
        return site == "layer_input" and number == span[0]
    layer = plan.layers[number]
    inside = {lost for region in layer.regions for lost in INSIDE_REGION[region]}
    return layer.action(site) is Action.keep and site not in inside


def _why_not(plan: Plan, sites: frozenset[str], small: set[str], options: OffloadOptions) -> str:
    """Why no layer offloads any of these sites; empty if one does."""
    if any(layer.offload & sites for layer in plan.layers):
        return ""
    if sites <= small:
        return f"its tensors are smaller than offload.min_bytes={options.min_bytes}"
    if all(not _kept(plan, number, site) for number in range(len(plan.layers)) for site in sites - small):
        return "it is recomputed, so there is nothing to copy"
    return f"offload.fraction={options.fraction} ends before it"


def _ordered(sites: Iterable[str]) -> list[str]:
    wanted = set(sites)
    return [site for site in SITES if site in wanted]
