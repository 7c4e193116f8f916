"""A plan as a compact table: layers down, sites across, one letter a cell. Imports no torch."""

from __future__ import annotations

from itertools import groupby

from memory.plan import Action, Plan
from memory.sites import INSIDE_REGION, SITES

LEGEND = "k kept, R recomputed, o offloaded, · inside a region that is re-run"
_LETTER = {Action.keep: "k", Action.recompute: "R", Action.offload: "o"}


def plan_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """(header, rows): layers that do the same in a row, as one row."""
    header = ["layers", *SITES, "regions"]
    rows = []
    keyed = ((_cells(plan, number), number) for number in range(len(plan.layers)))
    for cells, run in groupby(keyed, key=lambda pair: pair[0]):
        numbers = [number for _, number in run]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        rows.append([name, *cells])
    return header, rows


def _cells(plan: Plan, number: int) -> list[str]:
    layer, span = plan.layers[number], plan.span_of(number)
    if span is not None:
        first, past = span
        head = _LETTER[layer.action("layer_input")] if number == first else "·"
        region = "layer" if past - first == 1 else f"layers {first}-{past - 1}"
        return [head, *["·"] * (len(SITES) - 1), region]
    inside = {site for region in layer.regions for site in INSIDE_REGION[region]}
    cells = ["·" if site in inside else _LETTER[layer.action(site)] for site in SITES]
    return [*cells, " ".join(sorted(layer.regions))]
