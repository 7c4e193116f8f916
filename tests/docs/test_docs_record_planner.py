from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.record_planner import main, rows_of


def _job(folder: Path, overrides: list[str], result: dict[str, Any], estimate: dict[str, Any] | None = None) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(["experiment=planner_a", *overrides]))
    (folder / "result.json").write_text(json.dumps({"status": "completed", **result}))
    if estimate:
        (folder / "estimate.json").write_text(json.dumps(estimate))


def test_a_row_for_each_automatic_plan_with_the_best_by_hand_within_its_budget(tmp_path: Path) -> None:
    _job(tmp_path / "0", [], {"step_s": 1.0, "peak_allocated_bytes": 100})
    _job(tmp_path / "1", ["plan=file", "plan.path=x.yml"], {"step_s": 1.1, "peak_allocated_bytes": 60})
    _job(tmp_path / "2", ["plan=file", "plan.path=y.yml"], {"step_s": 1.05, "peak_allocated_bytes": 80})
    told = {"budget_bytes": 70, "peak_bytes": 68, "step_s": 1.08, "lower_bound_s": 1.02}
    _job(tmp_path / "3", ["plan=auto"], {"step_s": 1.09, "peak_allocated_bytes": 69}, told)
    assert list(rows_of(tmp_path)) == [
        {
            "setting": "a",
            "budget_bytes": 70,
            "predicted_peak_bytes": 68,
            "peak_bytes": 69,
            "predicted_step_s": 1.08,
            "step_s": 1.09,
            "lower_bound_s": 1.02,
            "best_hand_step_s": 1.1,
        }
    ]


def test_folders_without_one_are_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2
