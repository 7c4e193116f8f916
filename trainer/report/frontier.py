"""experiment=frontier_*: both engines' memory options against keeping everything, as JSON and as a picture.

Such a sweep has a row named keep, first, and one named keep_last; what lies between is measured against their mean.
Imports no torch; matplotlib only to draw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.report.records import CONFIG, write_atomically
from trainer.report.sweep import Job, common_overrides, compare, own_overrides, pareto

PREFIX = "frontier"
KEEP, KEEP_LAST = "keep", "keep_last"
#: keys of the configuration that say what was measured
_SETTING = {
    "model": ("name", "num_layers", "hidden_size", "vocab_size", "seq_length"),
    "trainer": ("micro_batch_size", "steps"),
    "optim": ("name",),
}


def is_frontier(jobs: Sequence[Job]) -> bool:
    return setting_name(jobs) is not None and [job.completed for job in jobs if job.name == KEEP] == [True]


def setting_name(jobs: Sequence[Job]) -> str | None:
    told = (text.partition("experiment=")[2] for text in common_overrides(jobs))
    return next((name for name in told if name.startswith(PREFIX)), None)


def frontier(folder: Path, jobs: Sequence[Job]) -> dict[str, Any]:
    """The content of frontier.json. `added`: time a token over keep's (the mean of first and last), minus 1."""
    (first,) = [job for job in jobs if job.name == KEEP]
    (last,) = [job for job in jobs if job.name == KEEP_LAST and job.completed] or [first]
    assert first.token_s is not None and last.token_s is not None
    keep_token_s = (first.token_s + last.token_s) / 2
    common = common_overrides(jobs)
    return {
        "hardware": first.result["hardware"],
        "versions": first.result["versions"],
        "setting": {"experiment": setting_name(jobs), **_setting(folder / first.number)},
        "date": first.result["started_at"][:10],
        "drift": last.token_s / first.token_s - 1,
        "rows": [
            {
                "engine": _engine(row.job),
                "name": row.job.name,
                "overrides": own_overrides(row.job, common),
                "step_s": row.job.step_s,
                "added": row.job.token_s / keep_token_s - 1 if row.job.token_s else None,
                "peak_bytes": row.job.peak_bytes,
                "offloaded_bytes": row.job.result.get("offloaded_bytes"),
                "d2h_gbps": row.job.result.get("d2h_gbps"),
                "losses_equal": row.losses_equal,
            }
            | ({} if row.job.completed else {"failed": row.job.message})
            for row in compare(jobs)
        ],
    }


def _engine(job: Job) -> str:
    """A job that was refused before it began has told nothing of its engine."""
    return str(job.result.get("engine", "megatron" if "engine=megatron" in job.overrides else "stash"))


def _setting(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((folder / CONFIG).read_text())
    return {f"{group}.{key}": config[group][key] for group, keys in _SETTING.items() for key in keys}


def write_frontier(folder: Path, jobs: Sequence[Job]) -> None:
    """frontier.json and frontier.png in the sweep's folder."""
    measured = frontier(folder, jobs)
    write_atomically(folder / "frontier.json", json.dumps(measured, indent=1) + "\n")
    draw_frontier(measured, folder / "frontier.png")


def draw_frontier(measured: dict[str, Any], path: Path) -> None:
    """Peak memory across, added step time upward, an engine a colour and a marker."""
    from trainer.report.picture import FAINT, label_points, memory_unit, new_figure, save

    setting, rows = measured["setting"], [row for row in measured["rows"] if row["added"] is not None]
    figure, axes = new_figure(
        f"What less memory costs: {setting['model.name']}, {setting['model.num_layers']} layers, "
        f"{setting['trainer.micro_batch_size']} x {setting['model.seq_length']} tokens",
        f"{measured['hardware']['device']}; torch {measured['versions']['torch']}, megatron-core "
        f"{measured['versions']['megatron-core']}; {measured['date']}; keep measured first and last: "
        f"{measured['drift']:+.1%}",
    )
    unit, size = memory_unit(max(row["peak_bytes"] for row in rows))
    labels = []
    for engine, prefix, title, marker, colour in (
        ("stash", "ours", "Megafit's plans", "o", "#1f6f8b"),
        ("megatron", "native", "Megatron's own options", "s", "#c77b30"),
    ):
        of_engine = [row for row in rows if row["engine"] == engine]
        points = {row["name"]: (row["peak_bytes"] / size, row["added"] * 100) for row in of_engine}
        axes.scatter([x for x, _ in points.values()], [y for _, y in points.values()], c=colour, marker=marker, s=40)
        best = sorted(points[name] for name in pareto(points))
        axes.plot([x for x, _ in best], [y for _, y in best], c=colour, linewidth=1, marker=marker, label=title)
        labels += [(x, y, name.removeprefix(f"{prefix}_"), colour) for name, (x, y) in points.items()]
    keep = next(row for row in rows if row["name"] == KEEP)
    axes.axvline(keep["peak_bytes"] / size, color=FAINT, linewidth=0.8, linestyle=":")
    axes.axhline(0, color=FAINT, linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"peak memory, {unit}")
    axes.set_ylabel("time a token over keep, %")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    label_points(axes, labels)
    save(figure, path)
