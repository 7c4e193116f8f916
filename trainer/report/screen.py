"""What a person sees: progress while the run goes on, and tables when it is over. Imports no torch."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from memory.table import LEGEND
from trainer.plan import ShownPlan
from trainer.report.baseline import Delta
from trainer.report.observer import EffectRow, RunInfo, StepRecord
from trainer.report.summary import Summary
from trainer.report.throughput import MEASURED, Throughput
from trainer.report.units import (
    NOTHING,
    bytes_text,
    change_text,
    count_text,
    duration_text,
    flops_text,
    milliseconds_text,
    percent_text,
    rate_text,
)

_REFRESH_S = 0.1


class Screen:
    """A live bar on a terminal, a line each `log_every` steps elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: _LiveProgress | None = None
        self._steps_done = 0
        self._seconds = 0.0

    def start(self, info: RunInfo, throughput: Throughput, plan: ShownPlan) -> None:
        config = info.config
        self._total = config.trainer.steps
        self._log_every = config.trainer.log_every
        self._throughput = throughput
        self._print(
            f"{config.model.name}: {count_text(info.parameters)} parameters, "
            f"{info.tokens_per_step:,} tokens a step, "
            f"{info.world_size} x {info.device_name}, peak {flops_text(throughput.peak.flops_per_s)} "
            f"({throughput.peak.source})"
        )
        self._console.print(plan_table(plan))
        for note in (LEGEND, *plan.notes, info.baseline.note):
            if note:
                self._print(note)
        if info.first_step > 1:
            self._print(f"going on at step {info.first_step}")
        if (
            self._console.is_terminal
            and not self._console.is_dumb_terminal
            and config.trainer.steps
            and config.logger.progress
        ):
            self._live = _LiveProgress(self._console, self._total, info.first_step - 1)

    def step(self, record: StepRecord) -> None:
        self._steps_done += 1
        self._seconds += record.step_s
        if self._live:
            self._live.update(record.step, self._step_text(record))
        elif record.step % self._log_every == 0 or self._steps_done == 1 or record.step == self._total:
            width = len(str(self._total))
            self._print(f"step {record.step:>{width}}/{self._total}  {self._step_text(record)}")

    def interval(self, row: Mapping[str, Any], change: Delta | None) -> None:
        """What goes beyond one step."""
        parts = [f"HFU {percent_text(row['hfu'])}"] if row["recomputed_flops"] else []
        if change is not None and any(dataclasses.astuple(change)):
            parts.append(
                f"over baseline: step {change_text(change.step)}, backward {change_text(change.backward)}, "
                f"peak saved {change_text(change.peak_saved)}"
            )
        if row["peak_device_share"] is not None:
            parts.append(f"peak {percent_text(row['peak_device_share'])} of the device")
        if row["copy_out_bytes_per_s"] is not None:
            parts.append(
                f"copies {rate_text(row['copy_out_bytes_per_s'])} out, {rate_text(row['copy_back_bytes_per_s'])} back, "
                f"stall {milliseconds_text(row['stall_s'])}"
            )
        if parts:
            self._note("  ".join(parts))

    def _note(self, text: str) -> None:
        if self._live:
            self._live.note(text)
        else:
            self._print(f"  {text}")

    def evaluated(self, step: int, val_loss: float) -> None:
        self._print(f"step {step}  validation loss {val_loss:.4f}")

    def close(self) -> None:
        """Takes the live display off; safe to call twice."""
        if self._live:
            self._live.stop()
            self._live = None

    def final(self, summary: Summary, folder: str) -> None:
        """The closing tables."""
        self.close()
        self._console.print(summary_table(summary, folder))
        if summary.effects:
            self._console.print(effects_table(summary.effects))
        for advice in summary.advice:
            self._print(f"advice: {advice}")

    def _step_text(self, record: StepRecord) -> str:
        tokens_per_s = record.tokens / record.step_s
        left_s = (self._total - record.step) * self._seconds / self._steps_done
        return "  ".join(
            (
                f"loss {record.loss:.4f}",
                f"lr {record.lr:.2e}",
                f"{tokens_per_s:,.0f} tokens/s",
                f"MFU {percent_text(self._throughput.mfu(tokens_per_s))}",
                f"saved {bytes_text(record.memory.peak_saved_bytes)}",
                f"left {duration_text(left_s)}",
            )
        )

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class _LiveProgress:
    """Drawn by the training thread itself, at most every _REFRESH_S seconds: a drawing thread could hold the console's
    lock at the moment when a checkpoint writer is forked, which then waits for it for ever."""

    def __init__(self, console: Console, total: int, completed: int) -> None:
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(None), console=console, auto_refresh=False
        )
        self._task = self._bar.add_task("step", total=total, completed=completed)
        self._text = Text("first step")
        self._note = Text("")
        self._live = Live(Group(self._bar, self._text, self._note), console=console, auto_refresh=False)
        self._live.start(refresh=True)
        self._drawn_s = time.monotonic()
        # log lines must go through the live display, which took sys.stdout and sys.stderr over: else they tear it
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler and handler.stream in (sys.__stdout__, sys.__stderr__):
                self._handlers.append((handler, handler.stream))
                handler.setStream(sys.stdout)

    def update(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step)
        self._text.plain = text
        if time.monotonic() - self._drawn_s >= _REFRESH_S:
            self._live.refresh()
            self._drawn_s = time.monotonic()

    def note(self, text: str) -> None:
        self._note.plain = text

    def stop(self) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._live.stop()


def summary_table(summary: Summary, folder: str) -> Table:
    """Everything a reader asks first, one fact a line."""
    table = _table("Run", header=False)
    table.add_column(style="bold")
    table.add_column()
    hardware = summary.hardware
    measured = " of a measured peak" if hardware.get("peak_source") == MEASURED else ""
    step_rate = f"forward {milliseconds_text(summary.forward_s)}, backward {milliseconds_text(summary.backward_s)}"
    sections: tuple[tuple[tuple[str, str], ...], ...] = (
        (
            ("status", ", ".join(part for part in (summary.status, summary.message) if part)),
            (
                "model",
                f"{summary.model}, {count_text(summary.parameters)} parameters"
                if summary.parameters
                else summary.model,
            ),
            ("memory options", f"{summary.memory_options} engine={summary.engine}"),
            ("device", f"{summary.world_size} x {hardware['device']}" if "device" in hardware else NOTHING),
            ("folder", folder),
        ),
        (
            ("steps", str(summary.steps)),
            ("loss", _first_to_last(summary.losses)),
            ("validation loss", NOTHING if summary.val_loss is None else f"{summary.val_loss:.4f}"),
        ),
        (
            ("tokens/s", NOTHING if summary.tokens_per_s is None else f"{summary.tokens_per_s:,.0f}"),
            ("MFU", percent_text(summary.mfu) + (measured if summary.mfu is not None else "")),
            ("step", f"{milliseconds_text(summary.step_s)} ({step_rate})"),
        ),
        (
            ("peak saved", bytes_text(summary.peak_saved_bytes)),
            (
                "a step",
                "kept {}, offloaded {}, recomputed {}".format(
                    *(bytes_text(n) for n in (summary.kept_bytes, summary.offloaded_bytes, summary.recomputed_bytes))
                ),
            ),
            *([("peak allocated", bytes_text(allocated))] if (allocated := summary.peak_allocated_bytes) else []),
            ("process", bytes_text(summary.rss_bytes)),
        ),
        _delta_rows(summary),
    )
    for section in sections:
        for name, value in section:
            table.add_row(name, Text(value))
        table.add_section()
    return table


def _delta_rows(summary: Summary) -> tuple[tuple[str, str], ...]:
    """What the plan changed; nothing where there is no baseline or the run is its own."""
    baseline, change = summary.baseline, summary.delta
    if baseline is None or change is None or not any(dataclasses.astuple(change)):
        return ()
    rows = [
        (
            "over baseline",
            f"step {change_text(change.step)}, forward {change_text(change.forward)}, "
            f"backward {change_text(change.backward)}, MFU drop {percent_text(change.mfu_drop)} ({baseline.source})",
        ),
        ("peak saved", f"{change_text(change.peak_saved)}, {bytes_text(change.peak_saved_bytes)} less"),
    ]
    if change.peak_allocated is not None:
        allocated = f"{change_text(change.peak_allocated)}, {bytes_text(change.peak_allocated_bytes)} less"
        rows.append(("peak allocated", allocated))
    return tuple(rows)


def effects_table(rows: Sequence[EffectRow]) -> Table:
    """What each requested option did; one that did nothing stands out."""
    table = _table("Options")
    for heading in ("option", "action"):
        table.add_column(heading)
    for heading in ("layers", "bytes a step"):
        table.add_column(heading, justify="right")
    table.add_column("remark")
    for row in rows:
        cells = (row.name, row.action, str(row.layers), bytes_text(row.bytes), row.remark)
        table.add_row(*map(Text, cells), style=None if row.layers else "yellow")
    return table


def plan_table(plan: ShownPlan) -> Table:
    """What each layer does with each site."""
    table = _table("Plan")
    for heading in plan.header:
        table.add_column(heading)
    for row in plan.rows:
        table.add_row(*map(Text, row))
    return table


def _table(title: str, header: bool = True) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, show_header=header, caption_justify="left")


def _first_to_last(losses: Sequence[float]) -> str:
    if not losses:
        return NOTHING
    last = losses[-1]
    return f"{losses[0]:.4f} -> {last:.4f}" if math.isfinite(last) else f"{losses[0]:.4f} -> {last}"
