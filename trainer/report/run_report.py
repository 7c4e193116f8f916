"""report.md, with pictures: what a run did with memory and time, for a person. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from memory.plan import Plan
from memory.sites import LayerShape
from trainer.report.baseline import Figures
from trainer.report.metrics import copy_metrics, peak_by_stage
from trainer.report.observer import Copies, Interval
from trainer.report.records import write_atomically
from trainer.report.summary import Summary, Tally
from trainer.report.units import (
    bytes_text,
    change_text,
    milliseconds_text,
    percent_text,
    rate_text,
)

REPORT = "report.md"
_KEPT = "everything kept"


def write_report(folder: Path, summary: Summary, tally: Tally, plan: Plan | None, shape: LayerShape) -> list[Path]:
    """Write report.md and its pictures into the run's folder. Returns the pictures; none before the first interval.

    plan: None: Megatron's own switches acted, and there is none to draw.
    """
    interval, figures = tally.last_interval, tally.plan.figures()
    if interval is None or figures is None:
        return []
    pictures = _draw(folder, summary, tally, interval, figures, plan, shape)
    parts = [f"# {_name(summary)}: {summary.status}, {summary.steps} steps"]
    for title, body in _sections(summary, tally, interval, figures, pictures):
        parts.append(f"## {title}\n\n{body}")
    write_atomically(folder / REPORT, "\n\n".join(parts) + "\n")
    return list(pictures.values())


def _name(summary: Summary) -> str:
    return f"{summary.model} {summary.memory_options}"


def _draw(
    folder: Path,
    summary: Summary,
    tally: Tally,
    interval: Interval,
    figures: Figures,
    plan: Plan | None,
    shape: LayerShape,
) -> dict[str, Path]:
    """By the section that shows it."""
    # a second to import
    from trainer.report.run_picture import draw_memory, draw_plan, draw_time

    device = f"{summary.world_size} x {summary.hardware.get('device')}"
    note = f"{_name(summary)}, {summary.tokens_per_step:,} tokens a step, {device}"
    names = {"Memory": "memory.png", "Time": "time.png"} | ({"Plan": "plan.png"} if plan else {})
    pictures = {section: folder / name for section, name in names.items()}
    before = tally.lead_in_interval
    memory = {_KEPT: before.categories} if before and before.under == "keep" else {}
    draw_memory({**memory, "plan": interval.categories}, note, pictures["Memory"])
    time = {f"{_KEPT} ({summary.baseline.source})": summary.baseline.figures} if summary.baseline else {}
    draw_time({**time, "plan": figures}, note, pictures["Time"])
    if plan:
        draw_plan(plan, shape, note, pictures["Plan"])
    return pictures


def _sections(
    summary: Summary, tally: Tally, interval: Interval, figures: Figures, pictures: dict[str, Path]
) -> Iterator[tuple[str, str]]:
    for section, body in (
        ("Time", _time(summary, interval, figures)),
        ("Memory", _memory(tally, interval)),
        ("Plan", _plan(interval)),
        ("Link", _link(interval.copies)),
        ("Advice", "\n".join(f"- {advice}" for advice in summary.advice) or "No threshold was passed."),
    ):
        picture = f"![{section}]({pictures[section].name})\n\n" if section in pictures else ""
        if body:
            yield section, picture + body


def _time(summary: Summary, interval: Interval, figures: Figures) -> str:
    base = summary.baseline.figures if summary.baseline else None
    change = summary.delta
    again = sum(interval.recomputed_flops_per_token.values()) / (summary.flops_per_token or 1)
    hfu = None if summary.mfu is None else summary.mfu * (1 + again)
    rows = [
        ("step", figures.step_s, base.step_s if base else None, change.step if change else None),
        ("forward", figures.forward_s, base.forward_s if base else None, change.forward if change else None),
        ("backward", figures.backward_s, base.backward_s if base else None, change.backward if change else None),
    ]
    table = [
        (name, milliseconds_text(value), milliseconds_text(kept), change_text(by)) for name, value, kept, by in rows
    ]
    stall_s = max(rank.stall_s for rank in interval.ranks)
    source = f" ({summary.baseline.source})" if summary.baseline else ""
    lines = [
        _table(("median", "plan", f"{_KEPT}{source}", "change"), table),
        f"MFU {percent_text(summary.mfu)}, a drop of {percent_text(change.mfu_drop if change else None)}; "
        f"HFU {percent_text(hfu)} with the {percent_text(again)} of the FLOPs that are done again; "
        f"{milliseconds_text(stall_s)} of a step compute stood still for copies.",
    ]
    return "\n\n".join(lines)


def _memory(tally: Tally, interval: Interval) -> str:
    before = tally.lead_in_interval
    header = ["of the peak, rank 0"]
    columns = [interval.categories]
    if before and before.under == "keep":
        header.append(_KEPT)
        columns.insert(0, before.categories)
    header.append("plan")
    rows = [(name, *(bytes_text(column.get(name)) for column in columns)) for name in interval.categories]
    total = ("all", *(bytes_text(sum(column.values())) for column in columns))
    lines = [_table(header, [*rows, total])]
    stages = peak_by_stage(interval)
    if len(interval.ranks) > 1:
        peaks = ", ".join(f"stage {stage}: {bytes_text(peak)}" for stage, peak in stages.items())
        lines.append(f"Largest peak of each pipeline stage: {peaks}.")
    pools = sum(rank.host_pool_bytes for rank in interval.ranks)
    lines.append(f"Host memory taken for offloading: {bytes_text(pools)}.")
    return "\n\n".join(lines)


def _plan(interval: Interval) -> str:
    actions = ("keep", "offload", "recompute")
    rows = [
        (site, *(bytes_text(done[action]) if action in done else "" for action in actions))
        for site, done in interval.sites.items()
    ]
    return _table(("bytes a step, rank 0", "kept", "offloaded", "recomputed"), rows)


def _link(copies: Copies | None) -> str:
    if copies is None:
        return ""
    numbers = copy_metrics(copies)
    rows = []
    for way, words in (("out", "to the host"), ("back", "to the device")):
        rows.append(
            (
                words,
                bytes_text(getattr(copies, f"{way}_bytes")),
                rate_text(numbers[f"copy_{way}_bytes_per_s"]),
                rate_text(getattr(copies, f"link_{way}_bytes_per_s")),
                percent_text(numbers[f"copy_{way}_link_share"]),
                bytes_text(getattr(copies, f"counted_{way}_bytes")),
            )
        )
    header = ("copies", "bytes a step", "while copying", "link alone", "share", "counted by the driver")
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell or " " for cell in line) + " |" for line in lines)
