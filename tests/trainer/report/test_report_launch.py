from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from trainer.config.schema import Config, LoggerConfig
from trainer.report.launch import Launch
from trainer.report.wandb_logger import run_group, run_name, run_tags

SWEEP = Launch({"model": "tiny", "recompute": "selective"}, ("recompute=selective",), "2026-11-29_10-00-00", 3)


def test_nothing_without_hydra() -> None:
    assert Launch.current() == Launch()


def test_names_groups_and_tags() -> None:
    config = Config(logger=LoggerConfig(tags=["night", "x" * 80, "model=tiny"]))
    assert run_name(config, SWEEP) == "custom-none-none-3"
    assert run_name(config, Launch()) == "custom-none-none"
    assert run_group(config, SWEEP) == "2026-11-29_10-00-00"
    assert run_group(config, Launch({"experiment": "long_context"})) == "long_context"
    assert run_group(config, Launch()) is None
    assert run_tags(config, SWEEP) == ["model=tiny", "recompute=selective", "night", "x" * 64]


def test_the_user_has_the_last_word() -> None:
    config = Config(logger=LoggerConfig(name="mine", group="ours"))
    assert run_name(config, SWEEP) == "mine"
    assert run_group(config, SWEEP) == "ours"


@pytest.mark.parametrize(
    ("job", "sweep", "number"),
    [
        (["hydra.mode=RUN"], None, None),
        (["hydra.mode=MULTIRUN", "hydra.job.num=7"], "night", 7),
        # a job of our launcher, which starts it as a run of its own
        (["hydra.mode=RUN", "hydra.job.num=7"], "night", 7),
    ],
)
def test_reads_what_hydra_knows(tmp_path: Path, job: list[str], sweep: str | None, number: int | None) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("layers: 2\n")
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "none.yaml").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("defaults: [{model: tiny}, {team: none}, _self_]\nsteps: 1\n")
    hydra_overrides = ["hydra.sweep.dir=multirun/night", "hydra.job.id=x", *job]
    try:
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            composed = compose("config", ["steps=3", *hydra_overrides], return_hydra_config=True)
            HydraConfig.instance().set_config(composed)
            launch = Launch.current()
    finally:
        HydraConfig.instance().cfg = None
    assert launch == Launch({"model": "tiny"}, ("steps=3",), sweep, number)
