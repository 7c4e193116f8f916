"""The run's one observer: hands what it hears to the screen, the files and wandb. Imports torch when a run starts."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from trainer.config.schema import Config, GuardAction
from trainer.plan import shown_plan
from trainer.report.baseline import BASELINE, to_json
from trainer.report.launch import Launch
from trainer.report.machine import host_facts
from trainer.report.metrics import interval_metrics, step_metrics
from trainer.report.observer import Advice, EffectRow, Interval, RunEnd, RunInfo, Status, StepRecord
from trainer.report.records import CONFIG, PLAN, RESULT, MetricsFile, write_atomically, write_result
from trainer.report.run_report import write_report
from trainer.report.screen import Screen
from trainer.report.summary import Summary, Tally, summarise
from trainer.report.throughput import Throughput, find_peak
from trainer.report.wandb_logger import WandbLogger
from trainer.shape import layer_shape

log = logging.getLogger(__name__)


class Reporter:
    """Observer of a run, and a context around it: left by an exception, the run's result says so.

        with Reporter(config, output_dir, resolved) as reporter:
            train(config, output_dir, resolved, reporter)

    Only rank 0 writes, shows and logs.
    """

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        resolved: str,
        *,
        rank: int | None = None,
        screen: Screen | None = None,
        launch: Launch | None = None,
    ) -> None:
        """`resolved` is the resolved configuration as YAML; `rank` and `launch` are found out where they are None."""
        self._config = config
        self._folder = output_dir
        self._resolved = resolved
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._screen = screen or Screen()
        self._launch = launch or Launch.current()
        self._started_at = _now()
        self._tally = Tally()
        self._hardware: dict[str, Any] = dict(host_facts())
        self._info: RunInfo | None = None
        self._throughput: Throughput | None = None
        self._metrics: MetricsFile | None = None
        self._wandb: WandbLogger | None = None
        self._unlogged: dict[str, Any] | None = None
        self._record: StepRecord | None = None
        self.summary: Summary | None = None
        if self._rank == 0:
            output_dir.mkdir(parents=True, exist_ok=True)
            # of an earlier run in this folder: as long as it's there it would speak for this one
            (output_dir / RESULT).unlink(missing_ok=True)
            write_atomically(output_dir / CONFIG, resolved)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.summary is None:
            status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.run_ended(RunEnd(status, None, f"{type(error).__name__}: {error}".rstrip(": ")))
        self._screen.close()

    def run_started(self, info: RunInfo) -> None:
        if not self._writes:
            return
        import torch

        self._info = info
        peak = find_peak(info.device_name, self._config.hardware, on_cpu=not torch.cuda.is_available())
        self._throughput = Throughput(info.flops_per_token, info.world_size, peak)
        self._hardware |= {
            "device": info.device_name,
            "peak_flops_per_s": peak.flops_per_s,
            "peak_source": peak.source,
            **info.hardware,
        }
        self._metrics = MetricsFile(self._folder, info.first_step)
        self._wandb = WandbLogger(self._config, self._folder, self._wandb_config(info), self._launch)
        plan = shown_plan(self._config, torch.cuda.is_available())
        write_atomically(self._folder / PLAN, plan.yaml)
        self._screen.start(info, self._throughput, plan)

    def step_done(self, record: StepRecord) -> None:
        if self._throughput is None or self._metrics is None or self._wandb is None:
            return
        self._tally.add(record)
        if self._tally.is_first_under_plan(record) and self._info and not self._info.baseline.is_baseline:
            self._store_baseline(self._info)
        self._record = record
        row = step_metrics(record, self._throughput)
        self._metrics.append(row)
        self._screen.step(record)
        first = self._info is not None and record.step == self._info.first_step
        if first or record.step % self._config.trainer.log_every == 0:
            self._wandb.log(row)
            self._unlogged = None
        else:
            self._unlogged = row

    def _store_baseline(self, info: RunInfo) -> None:
        """Once it is measured, so that a run that goes on from this one has it even if this one is killed."""
        baseline = self._tally.baseline(info.baseline)
        if baseline is not None and baseline.source == "measured":
            write_atomically(self._folder / BASELINE, to_json(baseline.figures, info.fingerprint))

    def effects(self, rows: Sequence[EffectRow]) -> None:
        self._tally.effects = tuple(rows)

    def interval(self, interval: Interval) -> None:
        self._tally.note(interval)
        if self._throughput is None or self._metrics is None or self._wandb is None or self._record is None:
            return
        row = interval_metrics(interval, self._record, self._throughput)
        self._metrics.append(row)
        self._wandb.log_interval(row)
        self._screen.interval(row, interval.delta)

    def advised(self, step: int, advice: Sequence[Advice]) -> None:
        self._tally.advice += advice
        if self._metrics is None:
            return
        self._metrics.append({"step": step, "advice": [dataclasses.asdict(one) for one in advice]})
        for one in advice:
            log.warning("%s", one)
        if self._config.guard.action is GuardAction.adapt:
            log.warning("guard.action=adapt: there is no ladder of plans to step along, so the plan stays")

    def evaluated(self, step: int, val_loss: float) -> None:
        self._tally.val_loss = val_loss
        if self._metrics is None or self._wandb is None:
            return
        row = {"step": step, "val_loss": val_loss}
        self._metrics.append(row)
        self._screen.evaluated(step, val_loss)
        self._wandb.log(row)

    def run_ended(self, end: RunEnd) -> None:
        self.summary = summarise(
            self._config, self._tally, end, self._info, self._throughput, self._hardware, self._started_at, _now()
        )
        if not self._writes:
            self._leave_failure(self.summary)
            return
        write_result(self._folder, self.summary)
        if self._info and self._info.baseline.is_baseline and self._tally.settled:
            self._store_baseline(self._info)
        if self._metrics:
            self._metrics.close()
        pictures = self._report(self.summary)
        self._screen.final(self.summary, str(self._folder))
        if self._wandb:
            if self._unlogged:
                self._wandb.log(self._unlogged)
            self._wandb.show_pictures("report", pictures)
            self._wandb.finish(_numbers(self.summary), succeeded=end.status in ("completed", "interrupted"))

    def _report(self, summary: Summary) -> list[Path]:
        if self._info is None:
            return []
        import torch

        shape = layer_shape(self._config, torch.cuda.is_available())
        return write_report(self._folder, summary, self._tally, self._info.plan, shape)

    @property
    def _writes(self) -> bool:
        return self._rank == 0

    def _leave_failure(self, summary: Summary) -> None:
        """The rank that failed knows the reason; rank 0 may be killed before it can write anything."""
        if summary.status == "failed" and not (self._folder / RESULT).exists():
            message = f"rank {self._rank}: {summary.message}"
            write_result(self._folder, dataclasses.replace(summary, message=message))

    def _wandb_config(self, info: RunInfo) -> dict[str, Any]:
        """The resolved configuration, and what it led to."""
        derived = {
            "parameters": info.parameters,
            "flops_per_token": info.flops_per_token,
            "tokens_per_step": info.tokens_per_step,
            "world_size": info.world_size,
            "versions": dict(info.versions),
            "hardware": self._hardware,
            "overrides": list(self._launch.overrides),
        }
        return {**(yaml.safe_load(self._resolved) or {}), "derived": derived}


def _numbers(summary: Summary) -> dict[str, float | str]:
    values = dataclasses.asdict(summary)
    values |= {f"delta/{key}": value for key, value in (values.pop("delta") or {}).items()}
    return {f"result/{key}": value for key, value in values.items() if isinstance(value, (int, float, str))}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
