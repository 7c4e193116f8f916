"""Real wandb runs without a network, read back from the file that `wandb sync` would send."""

from __future__ import annotations

import importlib
import io
import json
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainer.config.schema import Config, LoggerConfig, WandbMode
from trainer.report.launch import Launch
from trainer.report.observer import RunEnd, RunInfo, StepRecord
from trainer.report.reporter import Reporter
from trainer.report.screen import Screen
from trainer.report.wandb_logger import WandbLogger

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_CHUNK_HEADER = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


@dataclass
class Logged:
    """What one .wandb file holds."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


def read_back(folder: Path) -> list[Logged]:
    """All runs of a folder, oldest first; wandb's own process may write the end of a file after `finish` came back."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    deadline_s = time.monotonic() + 30
    while True:
        runs = [_read(path.read_bytes()) for path in files]
        if all(run.ended for run in runs):
            return runs
        assert time.monotonic() < deadline_s, "a run's file has no end"
        time.sleep(0.05)


def _read(data: bytes) -> Logged:
    """The file is a LevelDB log of protobuf records."""
    record_type: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    logged, part, at = Logged(), b"", _FILE_HEADER_BYTES
    while at + _CHUNK_HEADER.size <= len(data):
        left_in_block = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left_in_block < _CHUNK_HEADER.size:
            at += left_in_block
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, at)
        at += _CHUNK_HEADER.size
        if at + length > len(data):
            break
        part += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            record = record_type()
            record.ParseFromString(part)
            part = b""
            _take(logged, record)
    return logged


def _take(logged: Logged, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        logged.run = record.run
        logged.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    elif kind == "history":
        values = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        logged.history.append({key: value for key, value in values.items() if not key.startswith("_")})
    elif kind == "summary":
        for item in record.summary.update:
            logged.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    elif kind == "metric":
        logged.metrics[record.metric.name or record.metric.glob_name] = record.metric
    elif kind == "exit":
        logged.ended = True


@pytest.fixture
def offline(config: Config) -> Config:
    return replace(config, logger=LoggerConfig(tags=["night"], project="trial"))


def run_through(
    config: Config, folder: Path, info: RunInfo, steps: list[StepRecord], launch: Launch, status: Any = "completed"
) -> None:
    screen = Screen(Console(file=io.StringIO()))
    with Reporter(config, folder, "model:\n  hidden_size: 128\n", screen=screen, launch=launch) as reporter:
        reporter.run_started(info)
        for step in steps:
            reporter.step_done(step)
        reporter.evaluated(steps[-1].step, 1 / 7)
        reporter.run_ended(RunEnd(status, 1 / 7, ""))


def test_offline_run_holds_values_and_config_and_goes_on_under_its_id(
    offline: Config,
    make_info: Callable[..., RunInfo],
    make_step: Callable[..., StepRecord],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    launch = Launch({"model": "tiny"}, ("model=tiny",), "sweep-1", 4)
    run_through(offline, tmp_path, make_info(), [make_step(step) for step in range(1, 13)], launch)

    (logged,) = read_back(tmp_path)
    run = logged.run
    assert (run.project, run.run_group, run.job_type) == ("trial", "sweep-1", "train")
    assert (run.display_name, run.notes) == ("custom-none-none-4", "model=tiny")
    assert list(run.tags) == ["model=tiny", "night"]
    assert logged.config["model"] == {"hidden_size": 128}
    derived = logged.config["derived"]
    assert (derived["parameters"], derived["overrides"]) == (1_234_567, ["model=tiny"])
    assert derived["versions"] == {"torch": "2.13.0"}
    assert derived["hardware"]["peak_source"] == "data sheet"

    # the first step, each log_every=5, the evaluation, and the last step although it isn't a fifth one
    assert [row["trainer/step"] for row in logged.history] == [1, 5, 10, 12, 12]
    assert logged.history[0] == {
        "trainer/step": 1,
        "train/loss": 1 / 3,
        "train/grad_norm": 0.1,
        "train/lr": 1e-3,
        "perf/tokens_per_s": 4096,
        "perf/model_flops_per_s": 4096e9,
        "perf/mfu": 4096e9 / (989.4e12 * 2),
        "perf/step_s": 0.5,
        "perf/forward_s": 0.125,
        "perf/backward_s": 0.25,
        "perf/optimizer_s": 0.0625,
        "memory/peak_saved_bytes": 3 << 20,
        "memory/kept_bytes": 2 << 20,
        "memory/offloaded_bytes": 1 << 20,
        "memory/recomputed_bytes": 1536,
        "memory/rss_bytes": 1 << 30,
    }
    assert logged.history[3] == {"trainer/step": 12, "val/loss": 1 / 7}
    assert logged.metrics["train/*"].step_metric == "trainer/step"
    assert logged.metrics["val/loss"].summary.min
    assert logged.metrics["memory/peak_saved_bytes"].summary.max
    assert logged.summary["result/status"] == "completed"
    assert logged.summary["result/tokens_per_s"] == 4096.0
    assert "wandb sync" in caplog.text
    assert "wandb" not in capfd.readouterr().out

    run_through(offline, tmp_path, make_info(first_step=13, earlier_losses=[0.1] * 12), [make_step(13)], launch)
    again = read_back(tmp_path)
    assert [one.run.run_id for one in again] == [(tmp_path / "wandb_id").read_text()] * 2


def test_a_silent_server_costs_the_timeout_and_then_the_run_goes_offline(
    offline: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("trainer.report.wandb_logger.INIT_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = replace(offline, logger=replace(offline.logger, base_url=url))
        logger = WandbLogger(config, tmp_path, {}, Launch())
        logger.log({"step": 1, "loss": 0.25})
        logger.finish({}, succeeded=True)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("wandb: online did not start")
    (logged,) = read_back(tmp_path)
    assert logged.history == [{"trainer/step": 1, "train/loss": 0.25}]


def test_a_failure_is_said_once(offline: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, values: object) -> None:
            raise ConnectionResetError("service is gone")

    logger = WandbLogger(replace(offline, logger=LoggerConfig(wandb_mode=WandbMode.disabled)), tmp_path, {}, Launch())
    logger._run = Broken()
    for step in (1, 2, 3):
        logger.log({"step": step, "loss": 1.0})
    logger.finish({}, succeeded=True)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "wandb: ConnectionResetError: service is gone; nothing more is logged there"
    ]


def test_without_wandb_installed_the_run_goes_on(
    offline: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = WandbLogger(offline, tmp_path, {}, Launch())
    logger.log({"step": 1, "loss": 1.0})
    logger.finish({}, succeeded=True)
    assert "wandb: offline did not start" in caplog.text


def test_disabled_leaves_no_trace(offline: Config, tmp_path: Path) -> None:
    config = replace(offline, logger=LoggerConfig(wandb_mode=WandbMode.disabled))
    logger = WandbLogger(config, tmp_path, {}, Launch())
    logger.log({"step": 1, "loss": 1.0})
    logger.finish({}, succeeded=True)
    assert list(tmp_path.iterdir()) == []
