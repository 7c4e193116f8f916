"""Estimate the experiments scale_* with and without plans, on paper. Imports no torch.

    python docs/scale.py

writes docs/results/planner-scale.json, of which docs/generate.py makes the table in docs/planner.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from memory.plan import LayerPlan, Plan  # noqa: E402
from memory.planner.pipeline import Prediction, decide, predict  # noqa: E402
from trainer.config.arguments import parse_arguments  # noqa: E402
from trainer.config.compose import compose_command  # noqa: E402
from trainer.config.schema import Config  # noqa: E402
from trainer.pipeline import Setting, make_setting  # noqa: E402

RESULT = ROOT / "docs" / "results" / "planner-scale.json"
GIB = 1 << 30
#: of a card of 80 GB: what is left beside CUDA's context, NCCL and fragmentation
BUDGET_GIB = 72
#: experiment -> micro-batch sizes
CASES: Mapping[str, tuple[int, ...]] = {
    "scale_70b": (1, 2, 4),
    "scale_175b": (1, 2, 4),
    "scale_462b": (1, 2, 4),
}


def config_of(*overrides: str) -> Config:
    return compose_command(parse_arguments(list(overrides))).jobs[0].config


def setting_of(experiment: str, micro_batch: int) -> Setting:
    """With micro-batches enough for the pipeline: the global batch grows with the micro-batch's size."""
    config = config_of(f"experiment={experiment}", f"trainer.micro_batch_size={micro_batch}")
    batch = (config.trainer.global_batch_size or 1) * micro_batch
    return make_setting(replace(config, trainer=replace(config.trainer, global_batch_size=batch)), has_cuda=True)


def whole_layers(layers: int) -> Plan:
    """recompute=full."""
    return Plan((LayerPlan(),) * layers, spans=tuple((number, number + 1) for number in range(layers)))


def figures(setting: Setting, found: Prediction) -> dict[str, float]:
    return {
        "peak_bytes": found.peak_bytes,
        "step_s": found.step_s,
        "mfu": setting.mfu(found.step_s),
        "offloaded_bytes": max(s.offloaded_bytes for s in found.simulations),
    }


def rows_of(experiment: str, micro_batch: int) -> dict[str, Any]:
    setting = setting_of(experiment, micro_batch)
    pipeline = setting.pipeline
    return {
        "experiment": experiment,
        "micro_batch_size": micro_batch,
        "keep": figures(setting, pipeline.keep),
        "full": figures(setting, predict(pipeline, whole_layers(pipeline.num_layers))),
        "auto": figures(setting, decide(pipeline, BUDGET_GIB * GIB).prediction),
    }


def main() -> None:
    rows = [rows_of(experiment, size) for experiment, sizes in CASES.items() for size in sizes]
    RESULT.write_text(json.dumps({"budget_gib": BUDGET_GIB, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
