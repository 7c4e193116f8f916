"""What one layer can do, and which of it is worth choosing from. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from memory.plan import Action, LayerPlan, Plan
from memory.planner.costs import REMADE, LayerCost
from memory.planner.simulate import simulate
from memory.planner.stage import Head, Stage
from memory.sites import INSIDE_REGION

#: made again element by element: nearly free, so never one without the others
_ELEMENTWISE = ("attn_norm_out", "mlp_norm_out", "act_out")
_ATTENTION = ("query", "key", "value", "core_attn_out")
_RESIDUALS = ("layer_input", "mlp_residual")


@dataclass(frozen=True)
class Profile:
    """One layer's actions and what they come to for one micro-batch."""

    layer: LayerPlan
    #: the layer is re-run as a whole from its input
    whole: bool
    kept_bytes: int
    offloaded_bytes: int
    #: added to the step by recomputation and by sharing the device's memory with copies; waiting not included
    added_s: float
    #: the most that the device holds while the layer runs backward, what it kept included
    backward_bytes: int


def profiles(cost: LayerCost, *, offload: bool = True) -> tuple[Profile, ...]:
    """All that is worth choosing for a layer, cheapest first; offload=False: nothing goes to the host."""
    return pareto(_measured(cost, layer, whole) for layer, whole in _choices(cost, offload))


def _choices(cost: LayerCost, offload: bool) -> Iterator[tuple[LayerPlan, bool]]:
    leave = (Action.keep, Action.offload) if offload else (Action.keep,)
    groups: list[tuple[tuple[str, ...], tuple[Action, ...]]] = [
        (_ELEMENTWISE, (Action.keep, Action.recompute)),
        (("fc1_out",), (*leave, Action.recompute)),
        (_ATTENTION, leave),
        (_RESIDUALS, leave),
    ]
    regions = [frozenset[str]()]
    if not cost.shape.fused_attention:
        regions.append(frozenset({"core_attn"}))
    for actions in product(*(choices for _, choices in groups)):
        of = {site: action for (sites, _), action in zip(groups, actions, strict=True) for site in sites}
        for region in regions:
            yield _layer(of, region), False
    yield LayerPlan(), True
    if offload:
        yield LayerPlan(offload=frozenset({"layer_input"})), True


def _layer(of: dict[str, Action], regions: frozenset[str]) -> LayerPlan:
    return LayerPlan(
        recompute=frozenset(site for site, action in of.items() if action is Action.recompute),
        offload=frozenset(site for site, action in of.items() if action is Action.offload),
        regions=regions,
    )


def _measured(cost: LayerCost, layer: LayerPlan, whole: bool) -> Profile:
    inside = {site for region in layer.regions for site in INSIDE_REGION[region]}
    offloaded = sum(cost.site_bytes[site] for site in layer.offload)
    kept = cost.rest_bytes
    added = 2 * offloaded * cost.seconds_per_copied_byte
    if whole:
        kept = 0 if layer.offload else cost.kept_bytes["layer_input"]
        added += cost.forward_s
    else:
        kept += sum(
            nbytes
            for site, nbytes in cost.kept_bytes.items()
            if site != "rest" and layer.action(site) is Action.keep and site not in inside
        )
        added += sum(cost.seconds[REMADE[site][1]] for site in layer.recompute)
        added += cost.seconds["core"] if layer.regions else 0.0
    plan = Plan((layer,), spans=((0, 1),) if whole else ())
    alone = simulate(_bare_stage(cost), plan)
    return Profile(layer, whole, kept, offloaded, added, alone.peak_bytes)


def _bare_stage(cost: LayerCost) -> Stage:
    """A layer by itself, so that its peak is its own."""
    return Stage(
        cost=cost,
        chunks=((0,),),
        rank=0,
        size=1,
        micro_batches=1,
        weight_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        workspace_bytes=0,
        link_bytes_per_s=1.0,
        gradients_grow=False,
        head=Head(),
        # everything that can leave has left, as it has in all but the last layers
        window_layers=0.0,
    )


def pareto(candidates: Iterable[Profile]) -> tuple[Profile, ...]:
    """Those that no other beats in every respect; of equals the first."""
    kept: list[Profile] = []
    for candidate in sorted(candidates, key=lambda p: (p.added_s, p.kept_bytes, p.offloaded_bytes, p.backward_bytes)):
        if not any(_beats(other, candidate) for other in kept):
            kept.append(candidate)
    return tuple(kept)


def _beats(one: Profile, other: Profile) -> bool:
    return (
        one.added_s <= other.added_s
        and one.kept_bytes <= other.kept_bytes
        and one.offloaded_bytes <= other.offloaded_bytes
        and one.backward_bytes <= other.backward_bytes
    )


def plan_of(choice: Iterable[tuple[int, Profile]], num_layers: int) -> Plan:
    """A plan of the whole model in which these layers (by number) follow these profiles and all others keep."""
    layers = [LayerPlan()] * num_layers
    spans = []
    for number, profile in choice:
        layers[number] = profile.layer
        if profile.whole:
            spans.append((number, number + 1))
    return Plan(tuple(layers), spans=tuple(sorted(spans)))
