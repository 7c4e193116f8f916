"""plan=auto on the machine: a few measured steps, another plan, the same losses; and the profile of the next run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from memory.plan import keep_plan
from memory.planner.pipeline import predict
from tests.trainer.run.run_recorder import Recorder
from trainer.calibration import Calibration, load_calibration, store_calibration
from trainer.config.schema import Config, PlanConfig, PlanSource
from trainer.pipeline import make_setting
from trainer.run.calibrate import fitted
from trainer.run.session import train

MakeConfig = Callable[..., Config]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> Config:
    """Adam's states and three of five layers' tensors."""
    config = make_config(steps=5, model={"num_layers": 5}, data={"cache_dir": str(tmp_path / "cache")})
    keep = make_setting(config, False).pipeline.keep.peak_bytes
    return replace(config, plan=PlanConfig(source=PlanSource.auto, budget=f"{int(0.93 * keep)}B", calibrate_steps=2))


def test_the_plan_changes_and_the_losses_do_not(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(replace(config, plan=PlanConfig()), tmp_path / "plain", "", Recorder())
    # As if copies were free and element-wise work dear: then it pays to send instead of making again.
    monkeypatch.setattr(
        "trainer.run.planned.measured",
        lambda *args: Calibration(link_gbps=1e6, pieces=(("attn_norm", 1.0), ("mlp_norm", 1.0), ("act", 1.0))),
    )
    watcher = Recorder()
    end = train(config, tmp_path / "auto", "", watcher)
    assert end.losses == plain.losses
    sent = [record.memory.offloaded_bytes for record in watcher.steps]
    assert sent[0] == sent[1] != sent[2] == sent[3] == sent[4] > 0


def test_the_next_run_of_this_kind_starts_from_the_profile(config: Config, tmp_path: Path) -> None:
    assert load_calibration(config, config.hardware) == Calibration()
    train(config, tmp_path / "first", "", Recorder())
    found = load_calibration(config, config.hardware)
    assert found.compute != 1.0 and dict(found.pieces).keys() == {"attn_norm", "mlp_norm", "fc1", "act"}
    train(config, tmp_path / "second", "", Recorder())
    assert load_calibration(config, config.hardware) == found
    said = json.loads((tmp_path / "second" / "estimate.json").read_text())["assumptions"]
    assert any("corrected by a run there" in line for line in said)


@pytest.mark.parametrize(
    "other",
    [{"model": {"num_layers": 3}}, {"micro_batch_size": 2}, {"parallel": {"distributed_optimizer": True}}],
)
def test_a_profile_is_of_one_kind_of_run(make_config: MakeConfig, tmp_path: Path, other: dict[str, Any]) -> None:
    plan, data = PlanConfig(source=PlanSource.auto, calibrate_steps=1), {"cache_dir": str(tmp_path)}
    one = make_config(plan=plan, data=data)
    store_calibration(one, one.hardware, Calibration(compute=2.0))
    assert load_calibration(one, one.hardware).compute == 2.0
    assert load_calibration(make_config(plan=plan, data=data, **other), one.hardware) == Calibration()
    assert load_calibration(replace(one, plan=PlanConfig()), one.hardware) == Calibration()


def test_a_broken_profile_is_none(config: Config) -> None:
    store_calibration(config, config.hardware, Calibration(compute=2.0))
    (file,) = Path(str(config.data.cache_dir)).glob("profiles/*.json")
    file.write_text("{")
    assert load_calibration(config, config.hardware) == Calibration()


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_the_fit_predicts_what_was_measured(config: Config, one_rank: None) -> None:
    plan = keep_plan(5)
    fit = fitted(config, False, plan, Calibration(), seconds=0.125, peak_bytes=12345678)
    (found,) = predict(make_setting(config, False, fit).pipeline, plan).simulations
    assert found.micro_batch_s == pytest.approx(0.125, rel=1e-3)
    assert found.peak_bytes == 12345678
