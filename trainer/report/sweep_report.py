"""The report on a sweep: on the screen, in its folder, in wandb. Made again from the same jobs it is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from trainer.config.schema import Config
from trainer.report.frontier import is_frontier, write_frontier
from trainer.report.launch import Launch
from trainer.report.recommend import recommendation
from trainer.report.records import write_atomically
from trainer.report.sweep import Row, common_overrides, compare, failures, read_jobs
from trainer.report.sweep_table import csv_text, markdown, print_sweep, records, sweep_console, where_measured
from trainer.report.wandb_logger import WandbLogger


def report_sweep(folder: Path, config: Config, console: Console | None = None) -> list[Row]:
    """Report on the jobs in `folder`; config says how to log. Returns the rows of those that did not complete."""
    jobs, name, console = read_jobs(folder), folder.resolve().name, console or sweep_console()
    rows = compare(jobs)
    if not rows:
        return []
    print_sweep(rows, console)
    pictures = _pictures(folder, name, rows)
    write_atomically(folder / "sweep.csv", csv_text(rows))
    advice = recommendation(rows, config.plan.max_slowdown)
    page = markdown(name, rows, pictures)
    write_atomically(folder / "sweep.md", page if advice is None else f"{page}\n{advice}\n")
    if advice is not None:
        console.print(advice, soft_wrap=True, highlight=False, markup=False)
    console.print(f"report: {folder / 'sweep.md'}", soft_wrap=True, highlight=False, markup=False)
    _log(folder, config, rows, pictures)
    return failures(rows)


def _pictures(folder: Path, name: str, rows: Sequence[Row]) -> list[str]:
    """Names of the pictures drawn; matplotlib takes a second, so it is imported by then only."""
    from trainer.report.sweep_picture import draw_sweep

    jobs, pictures = [row.job for row in rows], []
    if draw_sweep(f"Sweep {name}", where_measured(rows), rows, folder / "sweep.png"):
        pictures.append("sweep.png")
    if is_frontier(jobs):
        write_frontier(folder, jobs)
        pictures.append("frontier.png")
    return pictures


def _log(folder: Path, config: Config, rows: Sequence[Row], pictures: Sequence[str]) -> None:
    common = common_overrides([row.job for row in rows])
    launch = Launch(overrides=common, sweep=folder.resolve().name)
    logger = WandbLogger(config, folder, {"overrides": common}, launch, job_type="sweep")
    logger.show_sweep(*records(rows), [folder / picture for picture in pictures])
    logger.finish({"jobs": len(rows), "failed": len(failures(rows))}, succeeded=not failures(rows))
