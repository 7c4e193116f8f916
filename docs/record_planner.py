"""Predicted against measured: from sweeps of experiment=planner_a and planner_b to docs/results/planner.json. No torch.

python docs/record_planner.py SWEEP_FOLDER...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from trainer.report.sweep import Job, read_jobs  # noqa: E402

RESULT = ROOT / "docs" / "results" / "planner.json"


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each job under plan=auto. best_hand_step_s: of the plan files whose peak is within its budget."""
    jobs = [job for job in read_jobs(folder) if job.completed]
    by_hand = [job for job in jobs if any(text.startswith("plan.path=") for text in job.overrides)]
    for job in jobs:
        if "plan=auto" not in job.overrides:
            continue
        told = json.loads((folder / job.number / "estimate.json").read_text())
        yield {
            "setting": next(text[-1] for text in job.overrides if text.startswith("experiment=")),
            "budget_bytes": told["budget_bytes"],
            "predicted_peak_bytes": told["peak_bytes"],
            "peak_bytes": job.peak_bytes,
            "predicted_step_s": told["step_s"],
            "step_s": job.step_s,
            "lower_bound_s": told["lower_bound_s"],
            "best_hand_step_s": _fastest(by_hand, told["budget_bytes"]),
        }


def _fastest(jobs: Sequence[Job], budget_bytes: int) -> float | None:
    within = [job.step_s for job in jobs if job.peak_bytes and job.step_s and job.peak_bytes <= budget_bytes]
    return min(within, default=None)


def main(folders: Sequence[str]) -> int:
    rows = [row for folder in folders for row in rows_of(Path(folder))]
    if not rows:
        print("no finished job under plan=auto in these folders", file=sys.stderr)
        return 2
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
