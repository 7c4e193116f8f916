"""On a GPU, in bf16 with Transformer Engine: every plan gives what keeping everything gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import LayerPlan, Plan, keep_plan
from memory.seed import seed_plan
from memory.sites import SITES
from tests.gpu.harness import MODEL, SHAPE, Run, differences, run_plan

RECOMPUTE = {
    "none": RecomputeOptions(),
    "selective": RecomputeOptions(Granularity.selective),
    "all_modules": RecomputeOptions(Granularity.selective, modules=["layernorm", "mlp_act", "mlp_fc1", "core_attn"]),
    "mlp": RecomputeOptions(Granularity.selective, modules=["layernorm", "mlp"]),
    "uniform1": RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=1),
    "uniform4": RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=4),
    "block3": RecomputeOptions(Granularity.full, method=Method.block, num_layers=3),
}
OFFLOAD = {
    "none": OffloadOptions(),
    "fine_grained": OffloadOptions(OffloadKind.fine_grained, min_bytes=0),
    "layerwise": OffloadOptions(OffloadKind.layerwise, min_bytes=0),
    "layerwise_double": OffloadOptions(OffloadKind.layerwise, min_bytes=0, double_buffering=True),
}


@cache
def kept(steps: int = 2) -> Run:
    return run_plan(keep_plan(MODEL.num_layers), steps=steps)


def assert_exact(run: Run, reference: Run) -> None:
    unequal, worst = differences(run, reference)
    assert unequal == 0, f"{unequal} losses or gradients differ, by up to {worst:.2e}"
    assert run.engine.held_bytes == 0


def test_keep_repeats_itself() -> None:
    assert_exact(run_plan(keep_plan(MODEL.num_layers)), kept())


@pytest.mark.parametrize("offload", OFFLOAD)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_pair(recompute: str, offload: str) -> None:
    seed = seed_plan(RECOMPUTE[recompute], OFFLOAD[offload], SHAPE, [range(MODEL.num_layers)])
    run = run_plan(seed.plan, seed.requests)
    assert_exact(run, kept())
    assert all(effect.layers for effect in run.engine.effects()), run.engine.effects()


@pytest.mark.parametrize("action", ["recompute", "offload"])
@pytest.mark.parametrize("site", SITES)
def test_each_site(site: str, action: str) -> None:
    if action == "recompute" and not SITES[site].recompute:
        pytest.skip(f"{site} is not recomputable by itself")
    layer = LayerPlan(**{action: frozenset({site})})
    run = run_plan(Plan(layers=(layer,) * MODEL.num_layers))
    assert_exact(run, kept())
    acted = {row[0] for row in run.engine.census.rows() if row[1] == site and row[2].value == action}
    assert acted == set(range(MODEL.num_layers))


def _everything() -> Plan:
    """Chains of recomputation from offloaded sources, in every layer."""
    recompute = frozenset({"attn_norm_out", "mlp_norm_out", "act_out"})
    return Plan(layers=(LayerPlan(recompute=recompute, offload=frozenset(SITES) - recompute),) * MODEL.num_layers)


def _slow_copies(engine: Any) -> None:
    tier = engine._books.tier
    copy = tier.copy

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        torch.cuda._sleep(2_000_000)
        copy(target, source)

    tier.copy = slow


def _poison_freed_memory(chunk: torch.nn.Module) -> None:
    """Fill what the allocator has free with NaN, so that a read of freed memory shows."""
    free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(max(0, free // (4 << 20) - 8))]
    del blocks


@pytest.mark.parametrize("prepare", [None, _slow_copies], ids=["", "slow_copies"])
@pytest.mark.parametrize("poison", [None, _poison_freed_memory], ids=["", "poisoned"])
def test_race_hunt(prepare: Callable[[Any], None] | None, poison: Callable[[torch.nn.Module], None] | None) -> None:
    steps = 50
    run = run_plan(_everything(), steps=steps, prepare=prepare, between_steps=poison)
    assert_exact(run, kept(steps))


def test_changing_shapes_and_evaluation_between() -> None:
    lengths = (512, 256, 384)

    def evaluate(chunk: torch.nn.Module) -> None:
        with torch.no_grad():
            chunk(torch.ones(1, 128, dtype=torch.long, device="cuda"), None, None)

    def position_free(chunk: torch.nn.Module) -> None:
        chunk.eval()
        evaluate(chunk)
        chunk.train()

    run = run_plan(_everything(), steps=6, seq_lengths=lengths, between_steps=position_free)
    assert_exact(run, run_plan(keep_plan(MODEL.num_layers), steps=6, seq_lengths=lengths))


def test_steady_steps_lock_no_host_memory() -> None:
    short, long = run_plan(_everything(), steps=1), run_plan(_everything(), steps=5)
    assert long.engine.host_pool_bytes == short.engine.host_pool_bytes > 0
