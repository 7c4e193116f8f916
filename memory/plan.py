"""Plans as data: for each layer, what is done with each tensor that it would keep for backward. Imports no torch.

A plan is decided (memory.seed, memory.planner), applied (memory.engine) and reported; between them it is this value,
written to and read from YAML without loss.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import yaml

from memory.sites import INSIDE_REGION, SITES, LayerShape


class Action(Enum):
    keep = "keep"
    recompute = "recompute"
    offload = "offload"


class PlanError(ValueError):
    """A plan that can't be: unknown names, layers out of range, an action that a site does not have."""


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does: sites not listed are kept."""

    recompute: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()
    #: spans of modules re-run as a whole: core_attn, mlp
    regions: frozenset[str] = frozenset()

    def action(self, site: str) -> Action:
        if site in self.recompute:
            return Action.recompute
        return Action.offload if site in self.offload else Action.keep

    @property
    def idle(self) -> bool:
        return not (self.recompute or self.offload or self.regions)


@dataclass(frozen=True)
class Plan:
    layers: tuple[LayerPlan, ...]
    #: whole layers re-run as one region each: [first, past the last)
    spans: tuple[tuple[int, int], ...] = ()
    #: smaller tensors stay on the device whatever their site's action
    min_offload_bytes: int = 0
    #: how many layers before its use in backward an offloaded tensor starts back
    reload_ahead: int = 1
    #: a whole-layer region's input is split over the tensor-parallel ranks
    distribute_saved_activations: bool = False

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            _check_layer(number, layer)
        covered: set[int] = set()
        for first, past in self.spans:
            if not 0 <= first < past <= len(self.layers):
                raise PlanError(f"whole_layers {first}-{past - 1}: the model has layers 0 to {len(self.layers) - 1}")
            for number in range(first, past):
                if number in covered:
                    raise PlanError(f"whole_layers: layer {number} is in two spans")
                covered.add(number)
                self._check_inside_span(number, first)

    def _check_inside_span(self, number: int, first: int) -> None:
        layer = self.layers[number]
        allowed = {"layer_input"} if number == first else set()
        lost = sorted((layer.recompute | layer.offload | layer.regions) - allowed)
        if lost:
            raise PlanError(f"layer {number} is re-run whole, so it keeps no {', '.join(lost)}: drop them or the span")

    def span_of(self, layer: int) -> tuple[int, int] | None:
        """The whole-layer region that holds this layer, if any."""
        return next((span for span in self.spans if span[0] <= layer < span[1]), None)

    @property
    def idle(self) -> bool:
        return not self.spans and all(layer.idle for layer in self.layers)

    def offload_bytes(self, shape: LayerShape, layers: Iterable[int]) -> int:
        """Host bytes of these layers' tensors for one micro-batch, as far as their sites' sizes are known."""
        sizes = [SITES[site].bytes_of(shape) for number in layers for site in self.layers[number].offload]
        return sum(size for size in sizes if size >= self.min_offload_bytes)

    def kept_bytes(self, shape: LayerShape, layers: Iterable[int]) -> int:
        """Device bytes that these layers keep for backward for one micro-batch, as far as sites' sizes are known."""
        total = 0
        for number in layers:
            layer, span = self.layers[number], self.span_of(number)
            lost = {site for region in layer.regions for site in INSIDE_REGION[region]}
            sites = [site for site in SITES if site not in lost]
            if span is not None:
                sites = ["layer_input"] if number == span[0] else []
            total += sum(SITES[site].bytes_of(shape) for site in sites if layer.action(site) is Action.keep)
        return total

    def to_yaml(self) -> str:
        rows: list[dict[str, Any]] = []
        numbered = enumerate(self.layers)
        for layer, run in groupby(numbered, key=lambda pair: pair[1]):
            numbers = [number for number, _ in run]
            if not layer.idle:
                rows.append({"layers": _range_text(numbers[0], numbers[-1] + 1)} | _layer_fields(layer))
        body: dict[str, Any] = {"num_layers": len(self.layers), "layers": rows}
        if self.spans:
            body["whole_layers"] = [_range_text(*span) for span in self.spans]
        body["min_offload_bytes"] = self.min_offload_bytes
        body["reload_ahead"] = self.reload_ahead
        body["distribute_saved_activations"] = self.distribute_saved_activations
        head = "# What each layer does with the tensors it would keep for backward; sites not named are kept.\n"
        return head + yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=120)

    @staticmethod
    def from_yaml(text: str) -> Plan:
        """Read what to_yaml writes. Raises PlanError naming what is wrong and where."""
        try:
            body = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"not YAML: {' '.join(str(error).split())}") from None
        known = (
            "num_layers",
            "layers",
            "whole_layers",
            "min_offload_bytes",
            "reload_ahead",
            "distribute_saved_activations",
        )
        body = _mapping(body, "the plan", known)
        count = _integer(body.get("num_layers"), "num_layers", at_least=1)
        layers = [LayerPlan()] * count
        taken: dict[int, int] = {}
        for index, row in enumerate(_list(body.get("layers", []), "layers")):
            where = f"layers[{index}]"
            row = _mapping(row, where, ("layers", "recompute", "offload", "regions"))
            plan = LayerPlan(
                recompute=frozenset(_names(row.get("recompute", []), f"{where}.recompute", SITES)),
                offload=frozenset(_names(row.get("offload", []), f"{where}.offload", SITES)),
                regions=frozenset(_names(row.get("regions", []), f"{where}.regions", INSIDE_REGION)),
            )
            for number in range(*_range(row.get("layers"), f"{where}.layers", count)):
                if number in taken:
                    raise PlanError(f"{where}: layer {number} is also in layers[{taken[number]}]")
                taken[number] = index
                layers[number] = plan
        spans = [_range(item, "whole_layers", count) for item in _list(body.get("whole_layers", []), "whole_layers")]
        distribute = body.get("distribute_saved_activations", False)
        if not isinstance(distribute, bool):
            raise PlanError("distribute_saved_activations: write true or false")
        return Plan(
            layers=tuple(layers),
            spans=tuple(spans),
            min_offload_bytes=_integer(body.get("min_offload_bytes", 0), "min_offload_bytes", at_least=0),
            reload_ahead=_integer(body.get("reload_ahead", 1), "reload_ahead", at_least=0),
            distribute_saved_activations=distribute,
        )


def keep_plan(num_layers: int) -> Plan:
    """The plan that changes nothing."""
    return Plan(layers=(LayerPlan(),) * num_layers)


def _check_layer(number: int, layer: LayerPlan) -> None:
    for site in sorted(layer.recompute):
        if not SITES[site].recompute:
            can = ", ".join(name for name, entry in SITES.items() if entry.recompute)
            raise PlanError(
                f"layer {number}: {site} can't be recomputed by itself; offload it, or recompute one of: {can}"
            )
    both = sorted(layer.recompute & layer.offload)
    if both:
        raise PlanError(f"layer {number}: {', '.join(both)} under both recompute and offload; write one")
    for region in sorted(layer.regions):
        lost = sorted((layer.recompute | layer.offload) & set(INSIDE_REGION[region]))
        if lost:
            raise PlanError(f"layer {number}: region {region} is re-run whole, so it keeps no {', '.join(lost)}")


def _layer_fields(layer: LayerPlan) -> dict[str, list[str]]:
    fields = {
        "recompute": [site for site in SITES if site in layer.recompute],
        "offload": [site for site in SITES if site in layer.offload],
        "regions": sorted(layer.regions),
    }
    return {name: value for name, value in fields.items() if value}


def _range_text(first: int, past: int) -> str | int:
    return first if past == first + 1 else f"{first}-{past - 1}"


def _range(value: Any, where: str, count: int) -> tuple[int, int]:
    parts = str(value).split("-")
    if value is None or len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise PlanError(f"{where}: {value!r} is no layer or range; write 3 or 0-7")
    first, last = int(parts[0]), int(parts[-1])
    if not first <= last < count:
        raise PlanError(f"{where}: {value} is outside layers 0 to {count - 1}")
    return first, last + 1


def _mapping(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected keys and values ({', '.join(known)}), found {type(value).__name__}")
    for key in value:
        _known(str(key), where, known)
    return value


def _names(value: Any, where: str, known: Iterable[str]) -> list[str]:
    return [_known(str(name), where, list(known)) for name in _list(value, where)]


def _known(name: str, where: str, known: Sequence[str]) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise PlanError(f"{where}: unknown name {name}; {hint}")
    return name


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{where}: expected a list, found {type(value).__name__}")
    return value


def _integer(value: Any, where: str, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise PlanError(f"{where}: expected a whole number of at least {at_least}, found {value!r}")
    return value
