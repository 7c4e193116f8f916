"""sweep.png: what each job's memory cost in time. Imports matplotlib, but no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.report.picture import GREY, label_points, memory_unit, new_figure, save
from trainer.report.sweep import Row

FRONT = "#1f6f8b"
BASE = "#c0392b"


def draw_sweep(title: str, note: str, rows: Sequence[Row], path: Path) -> bool:
    """Peak memory across, step time upward; dominated jobs grey. Returns whether there was a job to draw."""
    shown = [row for row in rows if row.job.completed and row.job.token_s and row.job.peak_bytes]
    if not shown:
        return False
    # all in the time of one step of the first: the same as each job's own where batches are equal
    batches = [row.job.result["tokens_per_step"] for row in shown]
    on_gpu = all(row.job.result.get("peak_allocated_bytes") is not None for row in shown)
    unit, unit_bytes = memory_unit(max(row.job.peak_bytes or 0 for row in shown))
    points = {
        row.job.number: ((row.job.peak_bytes or 0) / unit_bytes, (row.job.token_s or 0) * batches[0] * 1e3)
        for row in shown
    }
    figure, axes = new_figure(title, note)
    front = sorted(points[row.job.number] for row in shown if row.on_front)
    axes.plot([x for x, _ in front], [y for _, y in front], color=FRONT, linewidth=1, label="least time for its memory")
    colours = [BASE if row.is_baseline else FRONT if row.on_front else GREY for row in shown]
    axes.scatter([x for x, _ in points.values()], [y for _, y in points.values()], c=colours, s=36, zorder=3)
    axes.set_xlabel(f"peak {'of the allocator' if on_gpu else 'held for backward'}, {unit}")
    axes.set_ylabel("step, ms" if len(set(batches)) == 1 else f"{batches[0]:,} tokens, ms")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    label_points(axes, [(*points[row.job.number], row.short_label, c) for row, c in zip(shown, colours, strict=True)])
    save(figure, path)
    return True
