"""Runs every test that needs a GPU and writes what came of each: record.py RESULT.json [pytest options].

Continuous integration has no GPU; the file shows when, on what and with which versions these tests last passed.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import pytest


class Outcomes:
    def __init__(self) -> None:
        self.tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = report.outcome


def main(result: Path, options: list[str]) -> int:
    import torch

    outcomes = Outcomes()
    code = pytest.main(["-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider", *options], plugins=[outcomes])
    counts = {name: list(outcomes.tests.values()).count(name) for name in ("passed", "failed", "skipped")}
    packages = ("torch", "megatron-core", "transformer-engine")
    record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "versions": {name: metadata.version(name) for name in packages},
        **counts,
        "tests": outcomes.tests,
    }
    result.write_text(json.dumps(record, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
