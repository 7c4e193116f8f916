"""Each threshold: what passes it, and what it says to type."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import LayerPlan, Plan
from memory.sites import LayerShape
from trainer.config.arguments import parse_arguments
from trainer.config.compose import compose_command
from trainer.config.schema import Config, GuardConfig, PlanConfig, PlanSource
from trainer.report.baseline import Delta
from trainer.report.guard import Observation, advise
from trainer.report.observation import freed_shares, observe
from trainer.report.observer import Copies, Interval, RankUse

NONE, LAYERS = Config(), Config(offload=OffloadOptions(OffloadKind.layerwise))
SELECTIVE = Config(recompute=RecomputeOptions(Granularity.selective))
FULL = Config(recompute=RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=1))
FINE = Config(offload=OffloadOptions(OffloadKind.fine_grained))
FILE = Config(plan=PlanConfig(PlanSource.file, "plan.yaml"))
BOTH = replace(FINE, recompute=SELECTIVE.recompute)


def modules(config: Config, *names: str) -> Config:
    return replace(config, recompute=replace(config.recompute, modules=list(names)))


def offloaded(config: Config, **changes: Any) -> Config:
    return replace(config, offload=replace(config.offload, **changes))


WITH_MLP = {"layernorm": (0.1, 0.0), "mlp": (0.5, 0.18)}

#: configuration, what is seen, threshold, what to type
TABLE = [
    (NONE, {"peak": 0.93}, "peak", "offload=fine_grained"),
    (SELECTIVE, {"peak": 0.93}, "peak", "offload=fine_grained"),
    (FINE, {"peak": 0.93}, "peak", "recompute=selective"),
    (offloaded(BOTH, fraction=0.5), {"peak": 0.93}, "peak", "offload.fraction=0.75"),
    (
        offloaded(BOTH, modules=["core_attn", "attn_proj"]),
        {"peak": 0.93},
        "peak",
        "'offload.modules=[core_attn,attn_proj,mlp_act]'",
    ),
    (
        replace(offloaded(LAYERS, num_layers=1), recompute=SELECTIVE.recompute),
        {"peak": 0.93},
        "peak",
        "offload.num_layers=2",
    ),
    (BOTH, {"peak": 0.93}, "peak", "'recompute.modules=[layernorm,mlp_act,mlp_fc1]'"),
    (modules(BOTH, "mlp_act", "mlp_fc1"), {"peak": 0.93}, "peak", "recompute=full recompute.modules=null"),
    (replace(FULL, offload=FINE.offload), {"peak": 0.93}, "peak", "trainer.micro_batch_size=4"),
    (FILE, {"peak": 0.93}, "peak", "let the plan offload or recompute more, fc1_out first"),
    (
        NONE,
        {"unused_reserved": 0.3},
        "unused_reserved",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
    ),
    (FINE, {"link": 1.0}, "link", "offload.fraction=0.9"),
    (offloaded(FINE, fraction=0.5), {"link": 1.0}, "link", "offload.fraction=0.45"),
    (offloaded(FINE, modules=["core_attn", "mlp_act"]), {"link": 1.0}, "link", "'offload.modules=[core_attn]'"),
    (LAYERS, {"link": 1.0}, "link", "offload.double_buffering=true"),
    (offloaded(LAYERS, double_buffering=True), {"link": 1.0}, "link", "offload.num_layers=2"),
    (FILE, {"link": 1.0}, "link", "let the plan offload fewer sites or layers"),
    (FINE, {"host": 0.95}, "host", "raise offload.host_limit_gib, or offload.fraction=0.9"),
    (
        FULL,
        {"mfu_drop": 0.2, "recomputed_flops": 0.1},
        "mfu_drop",
        "recompute=selective recompute.method=null recompute.num_layers=null",
    ),
    (FINE, {"mfu_drop": 0.2}, "mfu_drop", "offload.fraction=0.5"),
    (NONE, {"mfu_drop": 0.2}, "mfu_drop", "recompute=none recompute.modules=null"),
    (
        modules(BOTH, "layernorm", "mlp"),
        {"backward": 0.3, "recomputed_flops": 0.14, "modules": WITH_MLP},
        "backward",
        "'recompute.modules=[layernorm]'",
    ),
    (BOTH, {"backward": 0.3}, "backward", "offload.fraction=0.5"),
    (
        modules(SELECTIVE, "mlp"),
        {"recomputed_flops": 0.2, "modules": {"mlp": (0.5, 0.2)}},
        "recomputed_flops",
        "recompute=none recompute.modules=null",
    ),
    (FILE, {"recomputed_flops": 0.2}, "recomputed_flops", "let the plan recompute fewer layers, matrix products first"),
    (
        modules(SELECTIVE, "core_attn", "mlp_act"),
        {"modules": {"core_attn": (0.004, 0.05), "mlp_act": (0.2, 0.0)}},
        "module_saves",
        "'recompute.modules=[mlp_act]'",
    ),
]


@pytest.mark.parametrize(("config", "seen", "threshold", "remedy"), TABLE)
def test_a_passed_threshold_says_what_to_type(
    config: Config, seen: dict[str, Any], threshold: str, remedy: str
) -> None:
    (advice,) = advise(config, Observation(**seen))
    assert (advice.threshold, advice.remedy) == (threshold, remedy)


@pytest.mark.parametrize("seen", [row[1] for row in TABLE])
def test_without_thresholds_nothing_is_said(seen: dict[str, Any]) -> None:
    names = [field.name for field in fields(GuardConfig) if field.name not in ("action", "module_costs")]
    nothing: dict[str, Any] = dict.fromkeys(names)
    off = replace(GuardConfig(), **nothing)
    assert advise(replace(NONE, guard=off), Observation(**seen)) == []


def test_at_a_threshold_nothing_is_said_yet() -> None:
    guard = GuardConfig()
    at = Observation(
        peak=guard.peak,
        unused_reserved=guard.unused_reserved,
        link=guard.link,
        host=guard.host,
        mfu_drop=guard.mfu_drop,
        backward=guard.backward,
        recomputed_flops=guard.recomputed_flops or 0,
        modules={"mlp": (0.01, 0.5), "core_attn": (0.0, 0.02)},
    )
    assert advise(BOTH, at) == [] == advise(BOTH, Observation())


@pytest.mark.parametrize(
    "row", [row for row in TABLE if "=" in row[3] and not row[3].startswith(("set", "raise"))], ids=lambda row: row[3]
)
def test_what_it_says_to_type_can_be_typed(row: tuple[Config, dict[str, Any], str, str], tmp_path: Path) -> None:
    """As further arguments of the command that was advised on, without a problem left."""
    config, _, _, remedy = row
    told = [f"recompute={config.recompute.granularity.value}", f"offload={config.offload.kind.value}"]
    for group in ("recompute", "offload"):
        names = getattr(config, group).modules
        told += [f"{group}.modules=[{','.join(names)}]"] if names else []
    if config.offload.num_layers:
        told.append(f"offload.num_layers={config.offload.num_layers}")
    (job,) = compose_command(parse_arguments([*told, *remedy.replace("'", "").split()])).jobs
    from trainer.config.machine import Machine
    from trainer.config.rules import validate

    assert validate(job.config, Machine(None, False, None, {})) == []


GIB = 1 << 30
RANK = RankUse(0, 0, 0.5, 1.0, 0.1, 0.0, 1, 60 * GIB, 80 * GIB, 80 * GIB, 3 * GIB, 4 * GIB, GIB)
DELTA = Delta(0.2, 0.1, 0.3, 0.15, -0.5, 10, None, None)


def interval(**changes: Any) -> Interval:
    fields: dict[str, Any] = {
        "step": 10,
        "under": "plan",
        "ranks": [RANK, replace(RANK, rank=1, peak_allocated_bytes=72 * GIB)],
        "categories": {},
        "sites": {},
        # out: 40 of the 50 that fit into forward; back: 40 of 80
        "copies": Copies(40, 1.0, 40, 1.0, 100.0, 80.0, None, None),
        "recomputed_flops_per_token": {"fc1_out": 1e8, "core_attn": 5e7},
        "delta": DELTA,
    }
    return Interval(**(fields | changes))


def test_an_interval_becomes_shares() -> None:
    seen = observe(interval(), 1e9, {"mlp_fc1": 0.4, "layernorm": 0.1})
    assert seen == Observation(
        peak=0.9,
        unused_reserved=0.25,
        link=0.8,
        host=0.75,
        mfu_drop=0.15,
        backward=0.3,
        recomputed_flops=1e8 / 1e9 + 5e7 / 1e9,
        modules={"mlp_fc1": (0.4, 0.1), "layernorm": (0.1, 0.0)},
    )


def test_without_a_gpu_only_times_and_flops_are_known() -> None:
    bare = replace(RANK, peak_allocated_bytes=None, peak_reserved_bytes=None, device_bytes=None)
    seen = observe(interval(ranks=[bare]), 1e9, {})
    assert (seen.peak, seen.unused_reserved, seen.link, seen.host) == (None, None, None, None)
    assert seen.backward == 0.3


def test_what_a_module_frees_is_its_part_of_all_that_would_be_kept() -> None:
    # one token: a residual of 2 bytes, heads 3 wide, F 8, softmax statistics of 4 bytes
    shape = LayerShape(
        seq_length=1, micro_batch_size=1, hidden=1, ffn=8, heads=1, query_width=3, kv_width=3, gated=True,
        fused_attention=True, element_bytes=2,
    )  # fmt: skip
    everything = 4 * 2 + 3 * 6 + 6 + 4 + 32 + 16
    norms = frozenset({"attn_norm_out", "mlp_norm_out"})
    plan = Plan(layers=(LayerPlan(recompute=norms, regions=frozenset({"core_attn"})), LayerPlan()))
    assert freed_shares(plan, shape) == {
        "core_attn": pytest.approx(4 / (2 * everything)),
        "layernorm": pytest.approx(4 / (2 * everything)),
    }
    assert freed_shares(Plan(layers=(LayerPlan(),) * 2, spans=((0, 2),)), shape) == {}
