from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.run.run_recorder import Recorder
from trainer.config.schema import Config, ProfileConfig, ProfileKind
from trainer.run.profile import Profile
from trainer.run.session import train

TRACE = ProfileConfig(ProfileKind.trace, steps=2)


class Tool:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize(
    ("lead_in", "steps", "looked_at"),
    [
        (0, 9, [3, 4]),
        (4, 20, [7, 8]),
        # too few for the warm-up: the last ones, but none from before the plan
        (0, 4, [2, 3]),
        (4, 6, [4, 5]),
        (0, 1, [0]),
    ],
)
def test_which_steps_are_looked_at(
    lead_in: int, steps: int, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Tool()
    monkeypatch.setattr("trainer.run.profile._tool", lambda *args: tool)
    profile = Profile(TRACE, [], Path(), rank=0, lead_in=lead_in, steps=steps)
    for done in range(steps):
        with profile.step(done):
            tool.calls.append(str(done))
    first, last = tool.calls.index("start"), tool.calls.index("stop")
    assert tool.calls[first + 1 : last] == [str(step) for step in looked_at]
    assert tool.calls.count("start") == tool.calls.count("stop") == 1


def test_a_trace_names_the_layers_and_changes_nothing(make_config: Callable[..., Config], tmp_path: Path) -> None:
    plain = train(make_config(steps=6, eval_batches=0), tmp_path / "a", "", Recorder())
    (tmp_path / "b").mkdir()
    traced = train(make_config(steps=6, eval_batches=0, profile=TRACE), tmp_path / "b", "", Recorder())
    assert traced == plain
    with gzip.open(tmp_path / "b" / "trace-rank0.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    for name in ("layer 0", "layer 1 mlp.linear_fc1", "layer 1 self_attention.core_attention"):
        assert names.count(name) == 2, name
    assert sum("Backward" in name for name in names) > 10
