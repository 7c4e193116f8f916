"""A plan as a compact table: sites down, layers across, those that do the same in one column. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from memory.plan import Plan
from memory.sites import INSIDE_REGION, SITES, LayerShape

LEGEND = "·: inside a region that is run again; bytes: one layer, one micro-batch, one rank"
#: of a site that lies in such a region
INSIDE = "·"


def plan_table(plan: Plan, shape: LayerShape) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row for each site, then one for the regions if there are any."""
    columns: dict[tuple[str, ...], list[int]] = {}
    for number in range(len(plan.layers)):
        columns.setdefault(layer_cells(plan, number), []).append(number)
    header = ["site", "MiB", *(f"layers {_numbers_text(numbers)}" for numbers in columns.values())]
    mib = [f"{site.bytes_of(shape) / (1 << 20):.2f}" if name != "rest" else "" for name, site in SITES.items()]
    rows = [list(row) for row in zip([*SITES, "regions"], [*mib, ""], *columns, strict=True)]
    return header, rows if any(rows[-1][2:]) else rows[:-1]


def layer_cells(plan: Plan, number: int) -> tuple[str, ...]:
    """What one layer does with each site, then its regions."""
    layer, span = plan.layers[number], plan.span_of(number)
    if span is not None:
        # Spans of one length are shown alike: all their heads in one column, all their other layers in another.
        head = number == span[0]
        inside = [INSIDE] * (len(SITES) - 1)
        size = span[1] - span[0]
        region = "layer" if size == 1 else f"{size} layers as one" if head else f"of {size}"
        return (layer.action("layer_input").value if head else INSIDE, *inside, region)
    lost = {site for region in layer.regions for site in INSIDE_REGION[region]}
    cells = [INSIDE if site in lost else layer.action(site).value for site in SITES]
    return (*cells, " ".join(sorted(layer.regions)))


def _numbers_text(numbers: Sequence[int]) -> str:
    """0-3,5,7-8"""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
