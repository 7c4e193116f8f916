"""A sweep as a table: on the screen, as Markdown and as CSV. Imports no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.report.sweep import Row, common_overrides, failures
from trainer.report.units import NOTHING, bytes_text, milliseconds_text

_HEADER = ("job", "overrides", "losses", "step", "to base", "peak", "to base", "val loss")
_LEFT = ("job", "overrides", "losses")
_LEGEND = "*: no other job is as good in step time and peak, and better in one; base: {}"
#: where no terminal says how wide it is: wide enough to leave a job's overrides on one line
_FILE_WIDTH = 140
#: fields of result.json that sweep.csv has besides those worked out of them
_RESULT_FIELDS = (
    "message",
    "steps",
    "step_s",
    "forward_s",
    "backward_s",
    "tokens_per_s",
    "mfu",
    "val_loss",
    "peak_allocated_bytes",
    "peak_saved_bytes",
    "kept_bytes",
    "offloaded_bytes",
    "recomputed_bytes",
    "rss_bytes",
)


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The heading, then a line a job; without the validation losses where they say nothing."""
    table = [list(_HEADER), *map(_cells, rows)]
    return table if len({line[-1] for line in table[1:]} - {NOTHING}) > 1 else [line[:-1] for line in table]


def _cells(row: Row) -> list[str]:
    val_loss = row.job.result.get("val_loss")
    losses = {None: row.job.status, True: "same", False: "other"}[row.losses_equal]
    return [
        row.job.number + ("*" if row.on_front else ""),
        row.label,
        "base" if row.is_baseline else losses,
        milliseconds_text(row.job.step_s),
        _change(row, row.step_change),
        bytes_text(row.job.peak_bytes),
        _change(row, row.peak_change),
        NOTHING if val_loss is None else f"{val_loss:.4f}",
    ]


def _change(row: Row, change: float | None) -> str:
    return NOTHING if change is None or row.is_baseline else f"{change:+.1%}"


def _legend(rows: Sequence[Row]) -> str:
    return _LEGEND.format(next((f"job {row.job.number}, {row.label}" for row in rows if row.is_baseline), "none"))


def failure_lines(rows: Sequence[Row]) -> list[str]:
    return [f"job {row.job.number} ({row.label}) {row.job.failure}" for row in failures(rows)]


def sweep_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def print_sweep(rows: Sequence[Row], console: Console) -> None:
    """The table, and below it how each job failed that did."""
    header, *jobs = lines(rows)
    table = Table(title="Sweep", title_justify="left", box=box.SIMPLE)
    for name in header:
        wraps = name == "overrides"
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=not wraps, overflow="fold")
    for row, line in zip(rows, jobs, strict=True):
        style = "red" if not row.job.completed else "bold" if row.on_front else None
        table.add_row(*map(Text, line), style=style)
    console.print(table)
    console.print(_legend(rows), soft_wrap=True, highlight=False, markup=False)
    for failed in failure_lines(rows):
        console.print(failed, style="red", soft_wrap=True, highlight=False, markup=False)


def markdown(name: str, rows: Sequence[Row], pictures: Sequence[str]) -> str:
    """A page: the table, what all jobs had alike, what failed, and the pictures (file names beside the page)."""
    header, *jobs = lines(rows)
    marks = ["---" if column in _LEFT else "---:" for column in header]
    table = ["| " + " | ".join(line) + " |" for line in (header, marks, *map(_escaped, jobs))]
    common = " ".join(common_overrides([row.job for row in rows]))
    failed = [f"- {line}" for line in failure_lines(rows)]
    parts = [
        f"# Sweep {name}",
        f"All jobs: `{common}`" if common else "",
        "\n".join(table),
        _legend(rows).replace("*", "\\*"),
        "\n".join(["Failed:", "", *failed]) if failed else "",
        "\n".join(f"![{picture}]({picture})" for picture in pictures),
        where_measured(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _escaped(line: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("*", "\\*") for cell in line]


def where_measured(rows: Sequence[Row]) -> str:
    """The device and the versions, of the first job that tells them."""
    result = next((row.job.result for row in rows if row.job.result.get("versions")), None)
    if result is None:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    device = f"{result['world_size']} x {result['hardware'].get('device', 'unknown device')}"
    return f"{device}; {versions}; {result['started_at'][:10]}"


def csv_text(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns, jobs = records(rows)
    writer.writerows([columns, *jobs])
    return out.getvalue()


def records(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """(columns, a line a job): its overrides one by one, result.json at full precision, and the comparison."""
    keys = list(dict.fromkeys(_key(text) for row in rows for text in row.job.overrides))
    compared = ("step_change", "peak_change", "losses_equal", "is_baseline", "on_front")
    jobs = []
    for row in rows:
        told = {_key(text): text.partition("=")[2] for text in row.job.overrides}
        jobs.append(
            [row.job.number, row.label, *(told.get(key) for key in keys), row.job.status]
            + [row.job.result.get(name) for name in _RESULT_FIELDS]
            + [row.job.peak_bytes, *(getattr(row, name) for name in compared)]
        )
    return ["job", "label", *keys, "status", *_RESULT_FIELDS, "peak_bytes", *compared], jobs


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")
