from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

TRAIN = Path(__file__).parents[2] / "train.py"

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs train.py with these arguments in an empty folder, as the only process of its run."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        alone = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HYDRA_FULL_ERROR")
        }
        return subprocess.run(
            [sys.executable, str(TRAIN), *arguments],
            cwd=tmp_path,
            env=alone | environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


@pytest.fixture
def acme() -> Path:
    """The example of a team's library: a package with its options in it."""
    return Path(__file__).parents[1] / "fixtures" / "acme"


@pytest.fixture
def site(acme: Path, tmp_path: Path) -> Path:
    """A folder for sys.path in which that package stands as pip would install it."""
    folder = tmp_path / "site"
    shutil.copytree(acme / "acme_megafit", folder / "acme_megafit")
    project = tomllib.loads((acme / "pyproject.toml").read_text())["project"]
    about = folder / f"acme_megafit-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
