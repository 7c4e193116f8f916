"""--help, --cfg and validate_only: what they say, and that they need neither torch nor a folder."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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
