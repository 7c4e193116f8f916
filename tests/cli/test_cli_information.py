"""--help, --cfg and validate_only: what they say, and that they need neither torch nor a folder."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from memory.options import OffloadOptions, RecomputeOptions
from memory.sites import ABSENT_MODULES, OFFLOAD_MODULES, RECOMPUTE_MODULES, SITES

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def test_validate_only_prints_configuration_and_plan(cli: Cli, tmp_path: Path) -> None:
    done = cli("validate_only=true", "recompute=selective", "offload=layerwise", "model.num_layers=3")
    assert done.returncode == 0, done.stderr
    text, _, plan = done.stdout.partition("\nPlan (")
    printed = yaml.safe_load(text)
    assert printed["model"]["num_layers"] == 3
    assert printed["recompute"]["granularity"] == "selective"
    cells = {line.split()[0]: line.split()[1:] for line in plan.splitlines()[1:] if line}
    assert cells["site"] == ["MiB", "layers", "0-1", "layers", "2"]
    assert cells["fc1_out"][1:] == ["offload", "keep"]
    assert cells["act_out"][1:] == ["recompute", "recompute"]
    assert list(tmp_path.iterdir()) == []


def test_validate_only_of_a_sweep_prints_each_job(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "validate_only=true", "recompute=none,full")
    assert done.returncode == 0, done.stderr
    assert [line.split()[2:4] for line in done.stdout.splitlines() if line.startswith("# job")] == [
        ["0:", "validate_only=True"],
        ["1:", "validate_only=True"],
    ]
    assert list(tmp_path.iterdir()) == []


def test_validate_only_takes_under_two_seconds_of_one_core(cli: Cli) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert cli("validate_only=true").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.parametrize("arguments", [["validate_only=true"], ["--cfg", "job"], ["--help"], ["recompute=fulll"]])
def test_torch_is_not_imported(arguments: list[str], tmp_path: Path) -> None:
    script = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = [{str(ROOT / "train.py")!r}, *{arguments!r}]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert stop.code in (0, None, 2), stop.code
heavy = [name for name in ("torch", "megatron.core", "wandb", "numpy") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_help_names_every_group_and_option(cli: Cli, tmp_path: Path) -> None:
    done = cli("--help")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    described = text.partition("Groups, chosen as group=option")[2].partition("Options of each")[0]
    groups = {folder.name for folder in CONF.iterdir() if any(folder.glob("*.yaml"))}
    assert {line.split()[0] for line in described.splitlines() if line.strip()} == groups
    assert all(len(line.split()) > 3 for line in described.splitlines() if line.strip())
    for group in groups:
        options = ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml")))
        assert f"{group}: {options}" in text
    commands = [line for line in text.splitlines() if line.strip().startswith("python train.py")]
    assert len(commands) == 5
    assert list(tmp_path.iterdir()) == []


def test_commands_of_the_help_are_right(cli: Cli) -> None:
    """Each everyday command passes the checks, save for the run folder that it invents."""
    lines = [line.strip() for line in cli("--help").stdout.splitlines() if line.strip().startswith("python train.py")]
    for line in lines:
        arguments = line.split("  ")[0].split()[2:]
        done = cli(*arguments, "validate_only=true")
        assert done.returncode == 0 or "error: resume: there is no folder" in done.stderr, (line, done.stderr)


@pytest.mark.parametrize("word", ["--help", "options"])
def test_a_reader_may_stop_reading(word: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), word]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_cfg_job_resolve(cli: Cli, tmp_path: Path) -> None:
    done = cli("--cfg", "job", "--resolve", "optim.lr=0.5", "optim.min_lr=${optim.lr}")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["optim"]["min_lr"] == 0.5
    assert list(tmp_path.iterdir()) == []


def test_flags_and_overrides_may_be_mixed(cli: Cli) -> None:
    done = cli("model.num_layers=2", "--cfg", "job", "trainer.steps=3", "-p", "trainer")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["steps"] == 3


def test_shadowed_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import train"
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"package models is found in {tmp_path / 'models'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_tells_every_memory_option_with_the_models_bytes(cli: Cli, tmp_path: Path) -> None:
    done = cli("options", "model=llama3_8b", "hardware=h100", "trainer.micro_batch_size=2")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    told = {words[0] for words in lines if len(words) > 1}
    assert {*RECOMPUTE_MODULES, *OFFLOAD_MODULES, *SITES, *ABSENT_MODULES} <= told
    options = [*fields(RecomputeOptions), *fields(OffloadOptions)]
    assert all(len(words) > 3 for words in lines if words and words[0] in {field.name for field in options})
    assert {field.name for field in options} <= told
    # 2 x 8192 tokens x 14336 x 2 (gate and linear) x 2 bytes
    assert ["mlp_act", "896.0"] in [words[:2] for words in lines]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("python train.py recompute=fu", ["recompute=full"]),
        ("python train.py -m model=tiny trainer.st", ["trainer.steps="]),
        ("python train.py --config-dir {library} team=", ["team=acme", "team=none"]),
        ("python train.py --config-dir {library} team=acme model=acme_sm", ["model=acme_small"]),
    ],
)
def test_completion(line: str, completed: list[str], cli: Cli, acme: Path) -> None:
    library = acme / "acme_megafit" / "conf"
    done = cli("-sc", "query=bash", COMP_LINE=line.format(library=library))
    assert (done.returncode, done.stdout.split()) == (0, completed), done.stderr


def test_completion_in_bash(cli: Cli, tmp_path: Path) -> None:
    """The script that -sc install=bash prints, as a shell calls it when the tab key is hit."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    script = cli("-sc", "install=bash").stdout
    line = "python train.py offload=l"
    done = subprocess.run(
        ["bash", "-c", f'{script}\nhydra_bash_completion\necho "${{COMPREPLY[@]}}"'],
        cwd=ROOT,
        env=os.environ
        | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "COMP_CWORD": "2"}
        | {"COMP_LINE": line, "COMP_POINT": str(len(line))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["offload=layerwise"], done.stderr
