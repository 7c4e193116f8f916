"""Every plan gives the losses and gradients of keeping everything, to the last bit, with dropout on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import LayerPlan, Plan
from memory.seed import seed_plan
from memory.sites import SITES
from models.config import ModelConfig
from tests.memory.conftest import GPT2_LIKE, MODEL, SDPA_DROPOUT, Run, assert_bitwise, run_plan, shape_of

MODELS = pytest.mark.parametrize("model", [MODEL, GPT2_LIKE], ids=["llama_like", "gpt2_like"])
ALL_MODELS = pytest.mark.parametrize(
    "model", [MODEL, GPT2_LIKE, SDPA_DROPOUT], ids=["llama_like", "gpt2_like", "sdpa_dropout"]
)
RECOMPUTE = {
    "none": RecomputeOptions(),
    "selective": RecomputeOptions(Granularity.selective),
    "uniform1": RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=1),
    "uniform3": RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=3),
    "block2": RecomputeOptions(Granularity.full, method=Method.block, num_layers=2),
}
OFFLOAD = {
    "none": OffloadOptions(),
    "fine_grained": OffloadOptions(OffloadKind.fine_grained, min_bytes=0),
    "half_fine_grained": OffloadOptions(OffloadKind.fine_grained, min_bytes=0, fraction=0.5),
    "layerwise": OffloadOptions(OffloadKind.layerwise, min_bytes=0),
    "layerwise_ahead": OffloadOptions(OffloadKind.layerwise, min_bytes=0, num_layers=4, double_buffering=True),
}


@ALL_MODELS
@pytest.mark.parametrize("offload", OFFLOAD)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_pair_is_bitwise(
    model: ModelConfig, recompute: str, offload: str, kept: Callable[[ModelConfig], Run]
) -> None:
    seed = seed_plan(RECOMPUTE[recompute], OFFLOAD[offload], shape_of(model), [range(model.num_layers)])
    run = run_plan(model, seed.plan, seed.requests)
    reference = kept(model)
    assert_bitwise(run, reference)
    if not seed.plan.idle:
        assert run.steps[-1].peak_saved_bytes < reference.steps[-1].peak_saved_bytes
        assert all(effect.layers > 0 for effect in run.engine.effects()), run.engine.effects()


@MODELS
@pytest.mark.parametrize(
    "modules", [["mlp"], ["core_attn"], ["mlp", "core_attn", "layernorm"], ["mlp_fc1", "mlp_act", "mlp_norm"]]
)
def test_selective_modules_are_bitwise(
    model: ModelConfig, modules: list[str], kept: Callable[[ModelConfig], Run]
) -> None:
    options = RecomputeOptions(Granularity.selective, modules=modules)
    for offload in (OFFLOAD["none"], OFFLOAD["fine_grained"], OFFLOAD["layerwise"]):
        seed = seed_plan(options, offload, shape_of(model), [range(model.num_layers)])
        assert_bitwise(run_plan(model, seed.plan), kept(model))


@MODELS
@pytest.mark.parametrize("action", ["recompute", "offload"])
@pytest.mark.parametrize("site", SITES)
def test_each_site_by_itself(model: ModelConfig, site: str, action: str, kept: Callable[[ModelConfig], Run]) -> None:
    if action == "recompute" and not SITES[site].recompute:
        pytest.skip(f"{site} can't be recomputed by itself: tests/memory/test_plan.py checks the refusal")
    layer = LayerPlan(**{action: frozenset({site})})
    run = run_plan(model, Plan(layers=(layer,) * model.num_layers))
    assert_bitwise(run, kept(model))
    acted = [row for row in run.engine.census.rows() if row[1] == site and row[2].value == action]
    assert {row[0] for row in acted} == set(range(model.num_layers))
