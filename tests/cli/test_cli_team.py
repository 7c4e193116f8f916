"""A team's library, as a folder and as an installed package, and what a team can get wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import train
from trainer.config.schema import TrainerConfig

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
CONF = Path("acme_megafit", "conf")

#: what is wrong, files that the team writes, arguments, words of the one line that it gets
BAD = [
    (
        "typo in a group's file",
        {"model/acme_wide.yaml": "hiden_size: 256\n"},
        "--config-dir {library} team=acme model=acme_wide",
        [
            "model.hiden_size: there is no such key (in {library}/model/acme_wide.yaml)",
            "Did you mean model.hidden_size?",
        ],
    ),
    (
        "missing directory",
        {},
        "--config-dir {library}/nowhere team=acme",
        ["--config-dir: there is no folder {library}/nowhere"],
    ),
    (
        "unknown group",
        {"modle/acme_wide.yaml": "hidden_size: 256\n"},
        "--config-dir {library} team=acme",
        ["--config-dir: {library}/modle: there is no group modle", "Did you mean model?"],
    ),
    (
        "shadowed option",
        {"model/tiny.yaml": "hidden_size: 256\n"},
        "--config-dir {library} team=acme",
        ["--config-dir: {library}/model/tiny.yaml is hidden by model/tiny.yaml in ", "Give it another name"],
    ),
    (
        "wrong type",
        {"optim/acme_fast.yaml": "lr: fast\n"},
        "--config-dir {library} team=acme optim=acme_fast",
        ["optim.lr: Value 'fast' of type 'str' could not be converted to Float (in {library}/optim/acme_fast.yaml)"],
    ),
    (
        "cyclic defaults",
        {"model/acme_a.yaml": "defaults: [acme_b]\n", "model/acme_b.yaml": "defaults: [/model: acme_a]\n"},
        "--config-dir {library} model=acme_a",
        ["its defaults list leads back to itself: model/acme_a -> model/acme_b -> model/acme_a", "{library}"],
    ),
    (
        "two teams with one name",
        {"../other/team/acme.yaml": "# @package _global_\nteam: acme\n"},
        "--config-dir {library} --config-dir {library}/../other team=acme",
        ["--config-dir: two libraries have a team acme: {library} and ", "Leave one out"],
    ),
    (
        "missing builder",
        {"model/acme_wide.yaml": "builder: acme_wide\n"},
        "--config-dir {library} team=acme model=acme_wide",
        [
            "model.builder: no installed package registers acme_wide under megafit.builders",
            "(set in {library}/model/acme_wide.yaml)",
            "pip install the team's package",
        ],
    ),
    (
        "a key by its name elsewhere",
        {"team/acme_old.yaml": "# @package _global_\nteam: acme_old\ntrainer: {train_iters: 5}\n"},
        "--config-dir {library} team=acme_old",
        [
            "trainer.train_iters: there is no such key (in {library}/team/acme_old.yaml)",
            "Did you mean trainer.steps?",
        ],
    ),
    (
        "absolute path that isn't there",
        {"data/acme_logs.yaml": "source: text\npath: /acme/logs/*.txt\n"},
        "--config-dir {library} team=acme data=acme_logs",
        ["data.path: no file matches /acme/logs/*.txt (set in {library}/data/acme_logs.yaml)"],
    ),
    (
        "an override of an option that is not there",
        {"team/bolt.yaml": "# @package _global_\ndefaults:\n- override /model: acme_smal\nteam: bolt\n"},
        "--config-dir {library} team=bolt",
        ["model/acme_smal: there is no such option (in {library}/team/bolt.yaml)", "Did you mean acme_small?"],
    ),
    (
        "an override of a group that is not there",
        {"team/bolt.yaml": "# @package _global_\ndefaults:\n- override /modle: acme_small\nteam: bolt\n"},
        "--config-dir {library} team=bolt",
        ["override /modle: no such group is chosen (in {library}/team/bolt.yaml)", "Did you mean model?"],
    ),
    (
        "a team's file without its first line",
        {"team/bolt.yaml": "team: bolt\ntrainer: {steps: 3}\n"},
        "--config-dir {library} team=acme",
        ["{library}/team/bolt.yaml holds keys of all groups", "Begin it with `# @package _global_`"],
    ),
    (
        "another ending",
        {"model/acme_wide.yml": "hidden_size: 256\n"},
        "--config-dir {library} team=acme",
        ["{library}/model/acme_wide.yml would not be read", "Name it acme_wide.yaml"],
    ),
    (
        "a team's file that does not say its name",
        {"team/bolt.yaml": "# @package _global_\ntrainer: {steps: 3}\n"},
        "--config-dir {library} team=bolt",
        ["team: {library}/team/bolt.yaml says None", "Write `team: bolt` in it"],
    ),
]


@pytest.mark.parametrize(("files", "arguments", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_a_team_gets_wrong_is_told_in_one_line(
    files: dict[str, str],
    arguments: str,
    words: list[str],
    acme: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = tmp_path / "library"
    shutil.copytree(acme / CONF, library)
    for name, text in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(text)
    there = tmp_path / "empty"
    there.mkdir()
    monkeypatch.chdir(there)
    assert train.main(arguments.format(library=library).split()) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    for word in words:
        assert word.format(library=library) in said
    assert list(there.iterdir()) == []


def test_a_package_is_a_library_that_needs_no_flag(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    assert train.main(["team=acme", "validate_only=true"]) == 0
    config = yaml.safe_load(capsys.readouterr().out.partition("\nPlan (")[0])
    assert (config["team"], config["model"]["name"], config["trainer"]["steps"]) == ("acme", "acme_small", 20)


def test_the_package_is_a_named_source(cli: Cli, site: Path) -> None:
    said = cli("--info", "searchpath", PYTHONPATH=str(site)).stdout
    assert f"| team acme (acme-megafit 1.0) | file://{site / CONF}" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "model.builder=acme_squared_rely",
            "Did you mean acme_squared_relu? Installed: acme_squared_relu (acme-megafit 1.0)",
        ),
        ("model.builder_extras.scal=2", "build_squared_relu takes no scal. Did you mean scale? Choices: scale"),
        ("model.builder_extras.scale=wide", "could not be converted to Float. build_squared_relu declares float"),
        ("data.extras.stride=1.5", "open_counting declares int"),
        ("data.opener=acme_count", "no installed package registers acme_count under megafit.data"),
        ("data.opener=null", "data.source=registered needs one"),
        ("engine=megatron", "engine=megatron builds Megatron's stock layers"),
        ("model.builder=null", "model.builder_extras: would do nothing"),
        ("data.source=mock", "data.opener: would do nothing: the source is mock"),
    ],
)
def test_what_is_registered_is_checked(
    arguments: str, words: str, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    chosen = ["team=acme", "model=acme_squared_relu", "data=acme_counting", "validate_only=true"]
    assert train.main([*chosen, *arguments.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("acme_megafit.conf", "acme_megafit.config"), "acme-megafit 1.0 names acme_megafit.config as its folder"),
        (("acme_megafit.conf", "acme_megafix.conf"), "there is no package acme_megafix"),
        (("acme_megafit.builders:", "acme_megafit.builder:"), "can't be imported: ModuleNotFoundError"),
        ((":build_squared_relu", ":__doc__"), "acme_megafit.builders:__doc__ of acme-megafit 1.0 is no function"),
    ],
)
def test_a_broken_package_is_named(
    change: tuple[str, str],
    words: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    entry_points.write_text(entry_points.read_text().replace(*change))
    monkeypatch.syspath_prepend(str(site))
    assert train.main(["team=acme", "model=acme_squared_relu", "validate_only=true"]) == 2
    assert words in capsys.readouterr().err


def test_two_packages_with_one_name_are_told(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second = site / "bolt_megafit-2.0.dist-info"
    second.mkdir()
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: bolt-megafit\nVersion: 2.0\n")
    (second / "entry_points.txt").write_text("[megafit.builders]\nacme_squared_relu = bolt_megafit:build\n")
    monkeypatch.syspath_prepend(str(site))
    assert train.main(["team=acme", "model=acme_squared_relu", "validate_only=true"]) == 2
    said = capsys.readouterr().err
    assert "model.builder: " in said and "both register acme_squared_relu" in said
    assert "acme-megafit 1.0" in said and "bolt-megafit 2.0" in said


def test_a_library_may_hold_plans(acme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "library"
    shutil.copytree(acme / CONF, library)
    (library / "plans").mkdir()
    (library / "plans" / "acme.yml").write_text("num_layers: 2\nlayers:\n- layers: 0-1\n  recompute: [act_out]\n")
    told = ["--config-dir", str(library), "team=acme", "plan=file", "plan.path=acme.yml", "validate_only=true"]
    assert train.main(told) == 0
    assert re.search(r"act_out +[\d.]+ +recompute", capsys.readouterr().out)


def explained(arguments: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert train.main(arguments.split()) == 0
    return [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]


def test_each_place_wins_over_those_before_it(acme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "library"
    shutil.copytree(acme / CONF, library)
    for group, steps in (("cluster", 31), ("experiment", 33)):
        (library / group / "acme_steps.yaml").write_text(f"# @package _global_\ntrainer: {{steps: {steps}}}\n")
    told = f"--config-dir {library} team=acme cluster=acme_steps experiment=acme_steps trainer.steps=34"
    assert explained(f"{told} explain=trainer.steps", capsys) == [
        ["trainer.steps", "= 34"],
        [str(TrainerConfig().steps), "our default, in the schema"],
        ["31", f"{library}/cluster/acme_steps.yaml"],
        ["20", f"{library}/team/acme.yaml"],
        ["33", f"{library}/experiment/acme_steps.yaml"],
        ["34", "command line: trainer.steps=34"],
    ]
    assert explained(f"--config-dir {library} +team=acme explain=model.num_layers", capsys) == [
        ["group", "model = acme_small"],
        ["tiny", "conf/config.yaml"],
        ["acme_small", f"{library}/team/acme.yaml"],
        ["model.num_layers", "= 2"],
        ["4", "our default, in the schema"],
        ["2", f"{library}/model/acme_small.yaml"],
    ]
    assert train.main(["explain=trainer.stepps"]) == 2
    assert "explain: there is no key trainer.stepps. Did you mean trainer.steps?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_team_sweeps_by_its_folder(cli: Cli, acme: Path, tmp_path: Path) -> None:
    done = cli(
        *("--config-dir", str(acme / CONF), "experiment=acme_recompute", "recompute=none,acme_cheap"),
        *("trainer.steps=2", "data=mock", "logger=none", "hydra.sweep.dir=sweep"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads((tmp_path / "sweep" / str(job) / "result.json").read_text()) for job in range(2)]
    assert [result["recompute"] for result in told] == ["none", "selective"]
    assert {result["model"] for result in told} == {"acme_small"}
    assert told[0]["losses"] == told[1]["losses"]


@pytest.mark.slow
def test_a_teams_package_brings_layers_and_data(cli: Cli, site: Path, tmp_path: Path) -> None:
    """Under the engine: what is recomputed and offloaded in the team's own MLP changes no loss."""
    chosen = ["team=acme", "model=acme_squared_relu", "data=acme_counting", "logger=none", "trainer.steps=3"]
    plans = [[], ["recompute=acme_cheap", "offload=fine_grained", "offload.min_bytes=0"]]
    results = []
    for number, plan in enumerate(plans):
        done = cli(*chosen, *plan, f"hydra.run.dir=run{number}", PYTHONPATH=str(site))
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads((tmp_path / f"run{number}" / "result.json").read_text()))
    keep, moved = results
    assert keep["model"] == "acme_squared_relu"
    assert keep["losses"] == moved["losses"] and keep["losses"][0] < 5
    assert {effect["name"] for effect in moved["effects"] if effect["bytes"]} >= {"mlp_act", "layernorm"}
    assert moved["peak_saved_bytes"] < keep["peak_saved_bytes"]
