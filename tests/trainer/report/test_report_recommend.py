from __future__ import annotations

from trainer.report.recommend import recommendation
from trainer.report.sweep import Job, compare


def _job(number: int, own: str, step_s: float, peak: int, moved: int = 1, experiment: str = "ladder") -> Job:
    result = {
        "status": "completed",
        "engine": "stash",
        "step_s": step_s,
        "tokens_per_step": 1,
        "peak_allocated_bytes": peak,
        "offloaded_bytes": moved,
        "recomputed_bytes": moved,
        "losses": [1.0],
    }
    return Job(str(number), (f"experiment={experiment}", *own.split()), result)


def _jobs(experiment: str = "ladder") -> list[Job]:
    return [
        _job(0, "", 1.0, 100, 0, experiment),
        _job(1, "recompute=selective", 1.02, 70, 1, experiment),
        _job(2, "recompute=selective offload=fine_grained", 1.04, 50, 1, experiment),
        _job(3, "recompute=full", 1.3, 40, 1, experiment),
    ]


def test_the_thriftiest_that_is_not_too_slow() -> None:
    line = recommendation(compare(_jobs()), 0.05)
    assert line is not None
    assert line.startswith("recommended: recompute=selective offload=fine_grained  (-50.0% peak, +4.0% step time")
    assert "recompute=full" in (recommendation(compare(_jobs()), 0.5) or "")


def test_keeping_everything_where_all_else_is_too_slow() -> None:
    assert "keep everything" in (recommendation(compare(_jobs()), 0.01) or "")


def test_only_for_the_ladder_and_only_from_what_completed() -> None:
    assert recommendation(compare(_jobs("pairs")), 0.05) is None
    assert recommendation(compare([Job("0", ("experiment=ladder",), {"status": "failed"})]), 0.05) is None
