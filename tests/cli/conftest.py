from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
