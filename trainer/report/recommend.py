"""Of a sweep from cheap to thrifty (experiment=ladder), which option to take. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.report.sweep import Row, common_overrides, own_overrides

_EXPERIMENT = "experiment=ladder"


def recommendation(rows: Sequence[Row], max_slowdown: float) -> str | None:
    """The thriftiest job that is at most so much slower than keeping everything, as a line of overrides.

    None for other sweeps, and where nothing can be compared.
    """
    common = common_overrides([row.job for row in rows])
    if _EXPERIMENT not in common:
        return None
    known = [row for row in rows if row.peak_change is not None and row.step_change is not None]
    fast = [row for row in known if (row.step_change or 0.0) <= max_slowdown]
    if not fast:
        return None
    best = min(fast, key=lambda row: (row.job.peak_bytes or 0, row.step_change or 0.0))
    own = own_overrides(best.job, common)
    if best.is_baseline or not own:
        return (
            f"recommended: keep everything; no other option is within {max_slowdown:.0%} of its step time and thriftier"
        )
    return (
        f"recommended: {' '.join(own)}  ({best.peak_change:+.1%} peak, {best.step_change:+.1%} step time; "
        f"limit {max_slowdown:.0%}, plan.max_slowdown)"
    )
