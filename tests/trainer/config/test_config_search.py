"""hydra/sweeper=search against a launcher that makes up its results: what is drawn, pruned and found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from trainer.config.errors import ConfigError, RunFailed
from trainer.config.schema import Objective
from trainer.config.search_path import CONF
from trainer.report.sweep import compare, failures, read_jobs

GIB = 1 << 30


class Launcher:
    """Runs nothing: `result` says what a job with these overrides comes to."""

    def __init__(self, folder: Path, result: Callable[[dict[str, str]], dict[str, Any]]) -> None:
        self.folder, self.result = folder, result
        self.launched: list[dict[str, str]] = []

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        (overrides,) = jobs
        told = dict(text.split("=", 1) for text in overrides)
        self.launched.append(told)
        result = self.result(told)
        folder = self.folder / str(initial_job_idx)
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
        (folder / "result.json").write_text(json.dumps(result))
        completed = result["status"] == "completed"
        returned = JobReturn(overrides, working_dir=str(folder))
        returned.status = JobStatus.COMPLETED if completed else JobStatus.FAILED
        returned.return_value = result.get("step_s") if completed else RunFailed("failed")
        return [returned]


def completed(step_s: float, peak_bytes: int) -> dict[str, Any]:
    return {"status": "completed", "step_s": step_s, "tokens_per_step": 1, "peak_allocated_bytes": peak_bytes}


def search(folder: Path, result: Callable[[dict[str, str]], dict[str, Any]], *arguments: str, **settings: Any) -> Any:
    (kind,) = [sweeper for sweeper in Plugins.instance().discover(Sweeper) if sweeper.__name__ == "SearchSweeper"]
    sweeper: Any = kind(**settings)
    sweeper._launcher = launcher = Launcher(folder, result)
    hydra_config = {"hydra": {"sweep": {"dir": str(folder)}}, "objective": Objective.token_s}
    sweeper._config = OmegaConf.create(hydra_config)
    with initialize_config_dir(str(CONF), "train", version_base="1.3"):
        sweeper._context = SimpleNamespace(config_loader=GlobalHydra.instance().config_loader())
        sweeper.sweep(list(arguments))
    return launcher


def outcome(told: dict[str, str]) -> dict[str, Any]:
    size = int(told["size"])
    if size == 4:
        return {"status": "failed", "message": "OutOfMemoryError: CUDA out of memory. Tried to allocate"}
    if size == 5:
        return {"status": "refused", "message": "size: 5 is too large. Write 4"}
    return completed(step_s=1 / size, peak_bytes=size * GIB)


def test_the_fastest_run_within_the_budget_is_found_and_others_are_pruned(tmp_path: Path) -> None:
    launcher = search(tmp_path, outcome, "fixed=1", "size=1,2,3,4,5", params={"size": "1,2"}, trials=20, budget_gib=2.5)
    # five different runs, however often Optuna draws them
    assert sorted(told["size"] for told in launcher.launched) == ["1", "2", "3", "4", "5"]
    assert {told["fixed"] for told in launcher.launched} == {"1"}
    found = yaml.safe_load((tmp_path / "search.yaml").read_text())
    assert found["best"] == {
        "job": next(number for number, told in enumerate(launcher.launched) if told["size"] == "2"),
        "value": 0.5,
        "peak_bytes": 2 * GIB,
        "overrides": ["size=2"],
    }
    assert (found["objective"], found["trials"], found["pruned"]) == ("token_s", 5, 3)
    jobs = {job.overrides[-1]: job for job in read_jobs(tmp_path)}
    assert jobs["size=4"].failure == "pruned: failed: OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert jobs["size=5"].failure == "pruned: refused: size: 5 is too large. Write 4"
    assert jobs["size=3"].completed
    assert failures(compare(list(jobs.values()))) == []


def test_a_fault_is_no_pruned_trial(tmp_path: Path) -> None:
    def broken(told: dict[str, str]) -> dict[str, Any]:
        return completed(1, 1) if told["size"] == "1" else {"status": "failed", "message": "KeyError: 'x'"}

    search(tmp_path, broken, "size=1,2")
    assert [row.job.failure for row in failures(compare(read_jobs(tmp_path)))] == ["failed: KeyError: 'x'"]


def test_no_run_within_the_budget(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="none of 2 trials ran within the budget; 2 were pruned"):
        search(tmp_path, outcome, "size=4,5")
    assert len(failures(compare(read_jobs(tmp_path)))) == 2


def test_numbers_are_drawn_from_an_interval(tmp_path: Path) -> None:
    seen = search(tmp_path, lambda told: completed(float(told["x"]), 1), "x=interval(0.5,2)", trials=6).launched
    assert len({told["x"] for told in seen}) == len(seen) == 6
    assert all(0.5 <= float(told["x"]) <= 2 for told in seen)


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    drawn = [search(tmp_path / str(run), outcome, "size=1,2,3", "x=interval(0,1)", trials=4).launched for run in (0, 1)]
    assert drawn[0] == drawn[1]


def test_nothing_to_draw_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is nothing to draw from"):
        search(tmp_path, outcome, "size=1")


def test_optuna_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"search needs Optuna.*pip install -e '\.\[search\]'"):
        search(tmp_path, outcome, "size=1,2")
