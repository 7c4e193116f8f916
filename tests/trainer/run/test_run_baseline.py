from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory.options import Granularity, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import LayerPlan, Plan, keep_plan
from tests.trainer.run.run_recorder import Recorder
from trainer.config.errors import ConfigError
from trainer.config.schema import BaselineConfig, BaselineMode, Config
from trainer.report.baseline import Choice, Figures, to_json
from trainer.report.launch import Launch
from trainer.report.reporter import Reporter
from trainer.report.units import milliseconds_text
from trainer.run.baseline import LeadIn, choose, keep_some
from trainer.run.session import train

MakeConfig = Callable[..., Config]

ACT = LayerPlan(recompute=frozenset({"act_out"}))
ALL_ACT = Plan(layers=(ACT,) * 8)
FIGURES = Figures(0.5, 0.1, 0.3, 0.05, 100, None)


def decided(plan: Plan | None = ALL_ACT, fits: Callable[[Plan], bool] = lambda plan: True, **changes: Any) -> Choice:
    given = {"steps": 100, "resume": None, "fingerprint": {}, "mode": BaselineMode.auto, "path": None} | changes
    config = BaselineConfig(given.pop("mode"), steps=5, path=given.pop("path"))
    return choose(config, plan, fits=fits, **given)


def test_auto_keeps_everything_first_where_that_fits() -> None:
    choice = decided()
    assert (choice.lead_in, choice.steps, choice.scale, choice.under) == (keep_plan(8), 8, 1.0, "keep")


def test_auto_keeps_as_many_layers_as_fit() -> None:
    choice = decided(fits=lambda plan: sum(layer.idle for layer in plan.layers) <= 2)
    assert choice.lead_in == Plan(layers=(ACT, ACT, ACT, LayerPlan()) * 2)
    assert (choice.scale, choice.under) == (4.0, "probe")
    assert "estimated" in choice.note


def test_probe_never_keeps_everything() -> None:
    assert decided(mode=BaselineMode.probe).scale == 2.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fits": lambda plan: False}, "not even a few layers"),
        ({"steps": 31}, "8 of 31 steps are too many"),
        ({"plan": None}, "Megatron's switches act from the first step"),
        ({"plan": keep_plan(8)}, "this run, which keeps everything"),
    ],
)
def test_without_a_lead_in_it_says_why(changes: dict[str, Any], words: str) -> None:
    choice = decided(**changes)
    assert choice.lead_in is None and words in choice.note
    assert choice.is_baseline == ("plan" in changes and changes["plan"] is not None)


def test_whole_layer_spans_are_kept_as_one() -> None:
    plan = Plan(layers=(LayerPlan(),) * 6, spans=((0, 2), (2, 4), (4, 6)))
    assert keep_some(plan, 2) == (3.0, dataclasses.replace(plan, spans=((0, 2), (4, 6))))
    # more than there are: the last of them
    assert keep_some(plan, 64) == (3.0, dataclasses.replace(plan, spans=((0, 2), (2, 4))))


def test_a_stored_baseline_is_found_by_its_fingerprint(tmp_path: Path) -> None:
    for name, device in (("one", "A"), ("two", "B")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "baseline.json").write_text(to_json(FIGURES, {"device": device, "steps": 1}))
    found = decided(mode=BaselineMode.file, path=str(tmp_path), fingerprint={"device": "B", "steps": 1}).stored
    assert found is not None and (found.source, found.figures) == ("file", FIGURES)
    with pytest.raises(ConfigError, match=r"baseline.path: .*device was 'A' and is 'C'"):
        decided(mode=BaselineMode.file, path=str(tmp_path / "one"), fingerprint={"device": "C", "steps": 1})
    with pytest.raises(ConfigError, match=r"there is no baseline.json"):
        decided(mode=BaselineMode.file, path=str(tmp_path / "one" / "checkpoints"))


def test_a_resumed_run_takes_over_the_baseline_of_the_first_if_it_is_still_the_same(tmp_path: Path) -> None:
    (tmp_path / "baseline.json").write_text(to_json(FIGURES, {"device": "A"}))
    same, other = (decided(resume=str(tmp_path), fingerprint={"device": device}) for device in "AB")
    assert same.stored is not None and same.lead_in is None
    assert other.stored is None and other.lead_in is not None


def test_the_plan_is_switched_on_once() -> None:
    switched: list[Plan] = []
    lead_in = LeadIn(Choice("", keep_plan(8), steps=2), ALL_ACT, switched.append)
    assert switched == [keep_plan(8)]
    assert [lead_in.under(done) for done in range(4)] == ["keep", "keep", "plan", "plan"]
    assert switched == [keep_plan(8), ALL_ACT]


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {
        "recompute": RecomputeOptions(Granularity.selective),
        "offload": OffloadOptions(OffloadKind.fine_grained, min_bytes=0),
        "steps": 16,
    }


@pytest.mark.parametrize("mode", [BaselineMode.auto, BaselineMode.probe])
def test_results_are_the_same_to_the_bit(
    make_config: MakeConfig, options: dict[str, Any], mode: BaselineMode, tmp_path: Path
) -> None:
    plain, watched = Recorder(), Recorder()
    off, on = BaselineConfig(BaselineMode.off), BaselineConfig(mode, steps=1)
    without = train(make_config(baseline=off, **options), tmp_path / "a", "", plain)
    with_one = train(make_config(baseline=on, **options), tmp_path / "b", "", watched)
    assert with_one == without
    assert [record.grad_norm for record in watched.steps] == [record.grad_norm for record in plain.steps]
    under = "keep" if mode is BaselineMode.auto else "probe"
    assert [record.under for record in watched.steps] == [under] * 4 + ["plan"] * 12
    assert watched.effects_after == [5]
    # each step holds what its plan holds
    first, last = watched.steps[0].memory, watched.steps[-1].memory
    assert last == dataclasses.replace(plain.steps[-1].memory, rss_bytes=last.rss_bytes)
    assert first.peak_saved_bytes > last.peak_saved_bytes
    assert (first.offloaded_bytes == 0) == (mode is BaselineMode.auto)


def test_the_records_hold_the_plan_against_its_baseline(
    make_config: MakeConfig, options: dict[str, Any], tmp_path: Path
) -> None:
    def result(folder: str, **changes: Any) -> dict[str, Any]:
        config = make_config(**(options | changes))
        with Reporter(config, tmp_path / folder, "", launch=Launch()) as reporter:
            train(config, tmp_path / folder, "", reporter)
        loaded: dict[str, Any] = json.loads((tmp_path / folder / "result.json").read_text())
        return loaded

    in_run = result("a", baseline=BaselineConfig(steps=1))
    kept = result("b", recompute=RecomputeOptions(), offload=OffloadOptions())
    path = str(tmp_path / "b")
    from_file = result("c", baseline=BaselineConfig(BaselineMode.file, path=path))
    assert (in_run["baseline"]["source"], from_file["baseline"]["source"]) == ("measured", "file")
    assert kept["baseline"]["figures"] == from_file["baseline"]["figures"]
    assert kept["delta"]["step"] == 0 and kept["delta"]["peak_saved_bytes"] == 0
    saved = kept["peak_saved_bytes"] - from_file["peak_saved_bytes"]
    assert saved > 0
    for run in (in_run, from_file):
        assert run["baseline"]["figures"]["peak_saved_bytes"] == kept["peak_saved_bytes"]
        assert run["delta"]["peak_saved_bytes"] == saved
        assert run["delta"]["step"] == run["step_s"] / run["baseline"]["figures"]["step_s"] - 1
    report = (tmp_path / "a" / "report.md").read_text()
    pictures = re.findall(r"!\[\w+\]\((\w+\.png)\)", report)
    assert pictures == ["time.png", "memory.png", "plan.png"]
    assert all((tmp_path / "a" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert f"| step | {milliseconds_text(in_run['step_s'])} |" in report
    with pytest.raises(ConfigError, match=r"trainer.micro_batch_size was 4 and is 2"):
        result("d", baseline=BaselineConfig(BaselineMode.file, path=path), micro_batch_size=2)
