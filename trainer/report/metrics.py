"""The numbers of steps and intervals, under the names of metrics.jsonl. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.report.observer import Copies, Interval, StepRecord
from trainer.report.throughput import Throughput


def step_metrics(record: StepRecord, throughput: Throughput) -> dict[str, Any]:
    """Flat: the step's own numbers and the rates made of them."""
    tokens_per_s = record.tokens / record.step_s
    memory = record.memory
    return {
        "step": record.step,
        "under": record.under,
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens": record.tokens,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s": throughput.model_flops_per_s(tokens_per_s),
        "mfu": throughput.mfu(tokens_per_s),
        "step_s": record.step_s,
        "forward_s": record.forward_s,
        "backward_s": record.backward_s,
        "optimizer_s": record.optimizer_s,
        "peak_saved_bytes": memory.peak_saved_bytes,
        "kept_bytes": memory.kept_bytes,
        "offloaded_bytes": memory.offloaded_bytes,
        "recomputed_bytes": memory.recomputed_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "rss_bytes": memory.rss_bytes,
    }


def interval_metrics(interval: Interval, record: StepRecord, throughput: Throughput) -> dict[str, Any]:
    """Of the interval whose last step is `record`; nested where there is one number a site, category or stage."""
    again = sum(interval.recomputed_flops_per_token.values()) / throughput.flops_per_token
    mfu = throughput.mfu(record.tokens / record.step_s)
    ranks = interval.ranks
    allocated = [rank.peak_allocated_bytes for rank in ranks]
    reserved = [rank.peak_reserved_bytes for rank in ranks]
    return {
        "step": interval.step,
        "hfu": None if mfu is None else mfu * (1 + again),
        "recomputed_flops": again,
        "stall_s": max(rank.stall_s for rank in ranks),
        "forward_s_max": max(rank.forward_s for rank in ranks),
        "backward_s_max": max(rank.backward_s for rank in ranks),
        "peak_saved_bytes_max": max(rank.peak_saved_bytes for rank in ranks),
        "peak_saved_bytes_min": min(rank.peak_saved_bytes for rank in ranks),
        "peak_allocated_bytes_max": _extreme(max, allocated),
        "peak_allocated_bytes_min": _extreme(min, allocated),
        "peak_reserved_bytes_max": _extreme(max, reserved),
        "peak_reserved_bytes_min": _extreme(min, reserved),
        "peak_device_share": peak_device_share(interval),
        "peak_by_stage_bytes": peak_by_stage(interval),
        "host_pool_bytes": sum(rank.host_pool_bytes for rank in ranks),
        "rss_bytes_max": max(rank.rss_bytes for rank in ranks),
        **copy_metrics(interval.copies),
        "categories": dict(interval.categories),
        "sites": {site: dict(actions) for site, actions in interval.sites.items()},
        "delta": dataclasses.asdict(interval.delta) if interval.delta else None,
    }


def copy_metrics(copies: Copies | None) -> dict[str, float | None]:
    """Rates while copying, and as a share of the link's."""
    named: dict[str, float | None] = {}
    for way in ("out", "back"):
        rate = share = counted = None
        if copies is not None and getattr(copies, f"{way}_s"):
            rate = getattr(copies, f"{way}_bytes") / getattr(copies, f"{way}_s")
            share = rate / getattr(copies, f"link_{way}_bytes_per_s")
            counted = getattr(copies, f"counted_{way}_bytes")
        named |= {
            f"copy_{way}_bytes_per_s": rate,
            f"copy_{way}_link_share": share,
            f"counted_{way}_bytes": counted,
        }
    return named


def peak_device_share(interval: Interval) -> float | None:
    """The fullest rank's peak over its device's memory; None without a GPU."""
    shares = [
        rank.peak_allocated_bytes / rank.device_bytes
        for rank in interval.ranks
        if rank.peak_allocated_bytes is not None and rank.device_bytes
    ]
    return max(shares, default=None)


def peak_by_stage(interval: Interval) -> dict[str, int]:
    """The largest peak of each pipeline stage's ranks: allocated, or without a GPU saved for backward."""
    peaks: dict[str, int] = {}
    for rank in interval.ranks:
        peak = rank.peak_saved_bytes if rank.peak_allocated_bytes is None else rank.peak_allocated_bytes
        peaks[str(rank.stage)] = max(peak, peaks.get(str(rank.stage), 0))
    return peaks


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a/b": 1}."""
    result: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}/") if isinstance(value, Mapping) else {name: value}
    return result


def _extreme(of: Callable[[Iterable[int]], int], values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return of(known) if known else None
