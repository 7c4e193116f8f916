"""Pictures of one run: where memory and time go, and what the plan does. Imports matplotlib, but no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memory.plan import Plan
from memory.sites import SITES, LayerShape
from memory.table import INSIDE, layer_cells
from trainer.report.baseline import Figures
from trainer.report.picture import FAINT, memory_unit, new_figure, save
from trainer.report.units import bytes_text, change_text

#: of a site's tensor, by what is done with it
_ACTIONS = {"keep": "#4c8dbf", "offload": "#e8a33d", "recompute": "#7fb069", INSIDE: "#d5e8cb"}
_ACTION_WORDS = {
    "keep": "kept",
    "offload": "offloaded",
    "recompute": "recomputed",
    INSIDE: "in a region that is run again",
}
_CATEGORIES = {
    "weights": "#1b3a57",
    "gradients": "#4c8dbf",
    "optimizer": "#9dbfd9",
    "stash": "#e8a33d",
    "loss head": "#c0392b",
    "workspace": "#7fb069",
    "fragmentation": "#c9c9c9",
}
_PARTS = {"forward": "#4c8dbf", "backward": "#e8a33d", "optimizer": "#1b3a57", "rest": "#c9c9c9"}
#: of a bar, that a label needs to fit in
_LABEL_SHARE = 0.06


def draw_memory(bars: Mapping[str, Mapping[str, int]], note: str, path: Path) -> None:
    """bars: what ran -> category -> bytes at its peak."""
    totals = [sum(categories.values()) for categories in bars.values()]
    unit, unit_bytes = memory_unit(max(totals))
    figure, axes = new_figure("Where memory goes at the peak", note)
    names = [name for name in _CATEGORIES if any(categories.get(name) for categories in bars.values())]
    parts = {name: [bars[bar].get(name, 0) / unit_bytes for bar in bars] for name in names}
    _stack(figure, axes, list(bars), parts, _CATEGORIES, "{:.1f}")
    for row, total in enumerate(totals):
        axes.text(total / unit_bytes, row, f"  {total / unit_bytes:.1f}", va="center", fontweight="bold")
    axes.set_xlabel(unit)
    save(figure, path)


def draw_time(bars: Mapping[str, Figures], note: str, path: Path) -> None:
    """bars: what ran -> its medians."""
    figure, axes = new_figure("Where a step's time goes", note)
    parts = {
        "forward": [figures.forward_s * 1e3 for figures in bars.values()],
        "backward": [figures.backward_s * 1e3 for figures in bars.values()],
        "optimizer": [figures.optimizer_s * 1e3 for figures in bars.values()],
    }
    steps = [figures.step_s * 1e3 for figures in bars.values()]
    parts["rest"] = [max(0.0, step - sum(part[row] for part in parts.values())) for row, step in enumerate(steps)]
    _stack(figure, axes, list(bars), parts, _PARTS, "{:.0f}")
    for row, step in enumerate(steps):
        change = f"  {change_text(step / steps[0] - 1)}" if row else ""
        axes.text(step, row, f"  {step:.0f} ms{change}", va="center", fontweight="bold")
    axes.set_xlabel("ms")
    save(figure, path)


def draw_plan(plan: Plan, shape: LayerShape, note: str, path: Path) -> None:
    """Layers across, sites down; bytes are one micro-batch's on one rank, by the catalogue's closed forms."""
    figure, axes = new_figure("What the plan does with each tensor", note)
    layers, sites = range(len(plan.layers)), list(SITES)
    figure.set_size_inches(max(7.0, min(16.0, 4 + 0.55 * len(layers))), 5.6)
    cells = [layer_cells(plan, number) for number in layers]
    totals = dict.fromkeys(_ACTIONS, 0)
    for column, actions in enumerate(cells):
        for row, (site, action) in enumerate(zip(sites, actions[:-1], strict=True)):
            axes.barh(row, 1, left=column, height=1, color=_ACTIONS[action], edgecolor="white", linewidth=1)
            totals[action] += SITES[site].bytes_of(shape)
    axes.set_xlim(0, len(layers))
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.grid(False)
    every = max(1, len(layers) // 16)
    axes.set_xticks([number + 0.5 for number in layers[::every]], [str(number) for number in layers[::every]])
    axes.set_xlabel("layer")
    sizes = [SITES[site].bytes_of(shape) for site in sites]
    labels = [f"{site}  {bytes_text(size)}" if size else site for site, size in zip(sites, sizes, strict=True)]
    axes.set_yticks(range(len(sites)), labels, fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    done = [action for action in _ACTIONS if any(action in column for column in cells)]
    handles = [
        Patch(color=_ACTIONS[action], label=f"{_ACTION_WORDS[action]} ({bytes_text(totals[action])})")
        for action in done
    ]
    _legend_below(figure, handles)
    save(figure, path)


def _stack(
    figure: Figure,
    axes: Axes,
    bars: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    form: str,
) -> None:
    """Horizontal bars, the first on top, each part with its number where it has room."""
    figure.set_size_inches(9, 1.9 + 0.8 * len(bars))
    longest = max(sum(values[row] for values in parts.values()) for row in range(len(bars)))
    for row in range(len(bars)):
        left = 0.0
        for name, values in parts.items():
            axes.barh(row, values[row], left=left, height=0.6, color=colours[name])
            if values[row] > _LABEL_SHARE * longest:
                dark = name in ("weights", "optimizer", "loss head") and colours[name] != "#9dbfd9"
                colour = "white" if dark else "black"
                axes.text(left + values[row] / 2, row, form.format(values[row]), ha="center", va="center", color=colour)
            left += values[row]
    axes.set_yticks(range(len(bars)), bars)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.25)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    _legend_below(figure, [Patch(color=colours[name], label=name) for name in parts])


def _legend_below(figure: Figure, handles: Sequence[Patch]) -> None:
    figure.legend(
        handles=list(handles), loc="outside upper left", ncols=len(handles), frameon=False, fontsize=9, labelcolor=FAINT
    )
