"""The numbers of one step, under the names of metrics.jsonl. Imports no torch."""

from __future__ import annotations

from typing import Any

from trainer.report.observer import StepRecord
from trainer.report.throughput import Throughput


def step_metrics(record: StepRecord, throughput: Throughput) -> dict[str, Any]:
    """Flat: the step's own numbers and the rates made of them."""
    tokens_per_s = record.tokens / record.step_s
    memory = record.memory
    return {
        "step": record.step,
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
