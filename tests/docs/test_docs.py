"""The pages say what the code does: generated parts are fresh, commands compose, paths exist, keys are told."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from docs.generate import PAGES, ROOT, filled, stale_pages
from trainer.config.arguments import Purpose, parse_arguments
from trainer.config.compose import compose_command, prepare
from trainer.config.errors import ConfigError, ConfigErrors
from trainer.config.machine import Machine
from trainer.config.rules import validate
from trainer.report.metrics import interval_metrics, step_metrics
from trainer.report.observer import Interval, RankUse, StepMemory, StepRecord
from trainer.report.summary import Summary
from trainer.report.throughput import UNKNOWN, Throughput

BARE_MACHINE = Machine(world_size=None, has_cuda=False, te_version=None, environment={})


def commands() -> list[tuple[str, list[str]]]:
    """(page, arguments) of each train.py command in a code block, without those that hold <placeholders>."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                at = next((index for index, word in enumerate(words) if word.endswith("train.py")), None)
                if at is not None and not any("<" in word for word in words):
                    found.append((page.name, words[at + 1 :]))
    return found


def library_of_the_page() -> dict[str, str]:
    """The files that docs/team-library.md has its reader write."""
    page = (ROOT / "docs" / "team-library.md").read_text()
    return dict(re.findall(r"^`(team_conf/\S+)`\n\n```yaml\n(.*?)```", page, re.DOTALL | re.MULTILINE))


def test_generated_parts_are_fresh() -> None:
    assert [page.name for page, _ in stale_pages()] == []


def test_a_stale_part_is_seen() -> None:
    page = next(page for page in PAGES if page.name == "README.md").read_text()
    assert "**tiny**" in page
    assert filled(page.replace("**tiny**", "**tinny**")) == page


def test_there_are_commands_to_check() -> None:
    names = [name for name, _ in commands()]
    assert names.count("README.md") >= 9
    assert {"configuration.md", "sweeps.md", "team-library.md"} <= set(names)
    assert len(library_of_the_page()) == 6


@pytest.mark.parametrize(
    ("page", "arguments"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_command_composes(page: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "megafit"
    (here / "texts").mkdir(parents=True)
    (here / "texts" / "a.txt").write_text("text")
    for name, text in library_of_the_page().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(here)
    command = parse_arguments(arguments)
    prepare(command)
    composition = compose_command(command)
    checked = composition.sweep is None or composition.sweep.check_first
    for job in composition.jobs:
        if command.purpose is Purpose.train and checked:
            assert [str(problem) for problem in validate(job.config, BARE_MACHINE)] == []


def test_a_wrong_command_would_be_seen() -> None:
    with pytest.raises((ConfigError, ConfigErrors)):
        compose_command(parse_arguments(["recompute=selektive"]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    for path, _, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in [_anchor(heading) for heading in headings], f"{page.name} links to {path}#{anchor}"
    for path in re.findall(r"`((?:conf|docs|tests|trainer|memory|models)/[\w./-]*)`", text):
        assert (ROOT / path).exists() or "mine" in path, f"{page.name} names {path}"


def _anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def told_keys(heading: str) -> set[str]:
    """Keys in the first column of the table under this heading of docs/records.md."""
    section = (ROOT / "docs" / "records.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def test_every_key_of_the_records_is_told() -> None:
    assert told_keys("result.json") == {field.name for field in dataclasses.fields(Summary)}
    memory = StepMemory(0, 0, 0, 0, None, 0)
    record = StepRecord(1, 1.0, None, 1.0, 1, 1.0, 1.0, 1.0, 1.0, memory)
    throughput = Throughput(1.0, 1, UNKNOWN)
    assert told_keys("metrics.jsonl") == set(step_metrics(record, throughput))
    rank = RankUse(0, 0, 1.0, 1.0, 1.0, 0.0, 1, None, None, None, 0, 0, 1)
    interval = Interval(1, "plan", [rank], {}, {}, None, {}, None)
    assert told_keys("Intervals in metrics.jsonl") == set(interval_metrics(interval, record, throughput))


def test_the_plan_file_shown_is_a_plan() -> None:
    from memory.plan import Plan

    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "plan-files.md").read_text(), re.DOTALL)
    plan = Plan.from_yaml(text)
    assert plan.spans == ((3, 4),)
    assert plan.layers[1].offload == {"layer_input", "fc1_out"}


def test_recorded_pairs_all_have_the_same_losses() -> None:
    measured = json.loads((ROOT / "docs" / "results" / "pairs-cpu.json").read_text())
    pairs = measured["pairs"]
    assert len({(pair["recompute"], pair["offload"]) for pair in pairs}) == 9
    assert all(pair["same_losses"] for pair in pairs)
    assert all(pair["peak_saved_bytes"] < pairs[0]["peak_saved_bytes"] for pair in pairs[1:])
