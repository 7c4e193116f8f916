from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.schema import Config, LoggerConfig, TrainerConfig, WandbMode
from trainer.report.baseline import Choice
from trainer.report.observer import RunInfo, StepMemory, StepRecord


@pytest.fixture(autouse=True)
def no_wandb_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the developer's machine has, a test logs to nobody's account."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def config() -> Config:
    """Twelve steps, wandb off."""
    return Config(trainer=TrainerConfig(steps=12, log_every=5), logger=LoggerConfig(wandb_mode=WandbMode.disabled))


@pytest.fixture
def make_info(config: Config, tmp_path: Path) -> Callable[..., RunInfo]:
    def make(**changes: Any) -> RunInfo:
        fields: dict[str, Any] = {
            "config": config,
            "output_dir": tmp_path,
            "parameters": 1_234_567,
            "flops_per_token": 1e9,
            "tokens_per_step": 2048,
            "world_size": 2,
            "device_name": "NVIDIA H200",
            "versions": {"torch": "2.13.0"},
            "hardware": {"driver": "570.1"},
            "first_step": 1,
            "earlier_losses": [],
            "plan": None,
            "baseline": Choice(""),
            "fingerprint": {"device": "NVIDIA H200"},
        }
        return RunInfo(**(fields | changes))

    return make


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    def make(step: int, **changes: Any) -> StepRecord:
        memory: dict[str, Any] = {
            "peak_saved_bytes": 3 << 20,
            "kept_bytes": 2 << 20,
            "offloaded_bytes": 1 << 20,
            "recomputed_bytes": 1536,
            "peak_allocated_bytes": None,
            "rss_bytes": 1 << 30,
        }
        fields: dict[str, Any] = {
            "step": step,
            "loss": 1 / (3 * step),
            "grad_norm": 0.1 * step,
            "lr": 1e-3,
            "tokens": 2048,
            "step_s": 0.5,
            "forward_s": 0.125,
            "backward_s": 0.25,
            "optimizer_s": 0.0625,
        }
        memory |= {key: changes.pop(key) for key in list(changes) if key in memory}
        return StepRecord(**(fields | changes), memory=StepMemory(**memory))

    return make
