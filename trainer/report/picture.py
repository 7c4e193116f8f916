"""Scatter plots with a label at every point that hide no label. Imports matplotlib, but no display and no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import cos, pi, sin
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

GREY = "#9a9a9a"
#: of text that explains
FAINT = "#555555"
_FONT = 8
#: of a point, in pixels, and of what needs no line to its point, in points
_RADIUS = 6
_NEAR = 14


def new_figure(title: str, note: str) -> tuple[Figure, Axes]:
    """A figure with a headline above and a small line below."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", wrap=True)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=_FONT, color=FAINT)
    return figure, axes


def memory_unit(largest_bytes: float) -> tuple[str, int]:
    """The unit in which memory up to this size is read best, and its bytes."""
    return ("GiB", 1 << 30) if largest_bytes >= 1 << 30 else ("MiB", 1 << 20)


def save(figure: Figure, path: Path) -> None:
    """The same points give the same bytes."""
    figure.savefig(path, dpi=130, metadata={"Software": None})


def label_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each (x, y, text, colour) beside its point, where it covers no point and no other label.

    Call it last: what changes the limits afterwards moves the points and leaves the labels.
    """
    axes.margins(0.14, 0.12)
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    centres = axes.transData.transform([(x, y) for x, y, _, _ in points])
    taken = [Bbox.from_extents(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in centres]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for x, y, text, colour in points:
        candidates = [_label(axes, (x, y), text, colour, *place) for place in _places()]
        boxes = [label.get_window_extent() for label in candidates]
        costs = [_cost(box, axes.bbox, taken) for box in boxes]
        best = costs.index(min(costs))
        for label in candidates[:best] + candidates[best + 1 :]:
            label.remove()
        taken.append(boxes[best])


def _label(
    axes: Axes, point: tuple[float, float], text: str, colour: str, offset: tuple[float, float], align: str
) -> Annotation:
    far = max(map(abs, offset)) > _NEAR
    label = axes.annotate(
        text,
        point,
        offset,
        textcoords="offset points",
        ha=align,
        va="center",
        fontsize=_FONT,
        color=colour,
        path_effects=[withStroke(linewidth=2, foreground="white")],
        arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkB": 4} if far else None,
    )
    label.set_in_layout(False)
    return label


def _places() -> Iterator[tuple[tuple[float, float], str]]:
    """Offsets in points from near to far, right and left first, and how text is aligned there."""
    for distance in (8, 14, 22, 32, 44, 58):
        for turn in (0, 1, 1 / 4, -1 / 4, 3 / 4, -3 / 4, 1 / 2, -1 / 2):
            x, y = distance * cos(turn * pi), distance * sin(turn * pi)
            yield (x, y), "center" if abs(turn) == 1 / 2 else "left" if x > 0 else "right"


def _cost(box: Bbox, inside: Bbox, taken: Sequence[Bbox]) -> float:
    """How badly a label would lie there: the area that it hides, and whether it leaves the axes."""
    common = [Bbox.intersection(box, other) for other in taken]
    leaves = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
    return sum(both.width * both.height for both in common if both is not None) + 1e6 * leaves
