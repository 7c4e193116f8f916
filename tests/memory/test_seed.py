from __future__ import annotations

from dataclasses import replace

import pytest

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import Action, Plan
from memory.seed import Seed, seed_plan
from memory.sites import OFFLOAD_MODULES, RECOMPUTE_MODULES, SITES, LayerShape

#: one Llama-3-8B layer, sequences of 4096 x 4, bf16
LLAMA = LayerShape(
    seq_length=4096,
    micro_batch_size=4,
    hidden=4096,
    ffn=14336,
    heads=32,
    query_width=4096,
    kv_width=1024,
    gated=True,
    fused_attention=True,
    element_bytes=2,
)
MIB = 1 << 20
SELECTIVE = RecomputeOptions(Granularity.selective)
FINE = OffloadOptions(OffloadKind.fine_grained)


def make(recompute: RecomputeOptions, offload: OffloadOptions, layers: int = 4, chunks: int = 1) -> Seed:
    size = layers // chunks
    return seed_plan(recompute, offload, LLAMA, [range(i * size, (i + 1) * size) for i in range(chunks)])


def test_bytes_of_each_site_are_those_measured_on_an_h200() -> None:
    measured = {
        "layer_input": 128, "attn_norm_out": 128, "query": 128, "key": 32, "value": 32, "attn_scores": 2,
        "core_attn_out": 128, "mlp_residual": 128, "mlp_norm_out": 128, "fc1_out": 896, "act_out": 448,
    }  # fmt: skip
    assert {name: SITES[name].bytes_of(LLAMA) / MIB for name in measured} == measured


def test_bytes_shrink_with_the_layout() -> None:
    tp2 = replace(LLAMA, tensor_parallel=2)
    assert SITES["fc1_out"].bytes_of(tp2) == 448 * MIB
    assert SITES["layer_input"].bytes_of(tp2) == 128 * MIB
    assert SITES["layer_input"].bytes_of(replace(tp2, sequence_parallel=True)) == 64 * MIB
    assert SITES["query"].bytes_of(replace(LLAMA, context_parallel=4)) == 32 * MIB
    assert SITES["attn_scores"].bytes_of(replace(LLAMA, fused_attention=False)) == 4 * 32 * 4096 * 4096 * 2


def test_selective_picks_what_pays_and_says_what_it_leaves_out() -> None:
    seed = make(SELECTIVE, OffloadOptions())
    assert {layer.recompute for layer in seed.plan.layers} == {frozenset({"attn_norm_out", "mlp_norm_out", "act_out"})}
    assert [request.name for request in seed.requests] == ["layernorm", "mlp_act"]
    assert any("left out core_attn: fused attention stores no scores" in note for note in seed.notes)

    unfused = seed_plan(SELECTIVE, OffloadOptions(), replace(LLAMA, fused_attention=False), [range(4)])
    assert {layer.regions for layer in unfused.plan.layers} == {frozenset({"core_attn"})}


def test_core_attn_under_fused_attention_is_warned_of() -> None:
    seed = make(RecomputeOptions(Granularity.selective, modules=["core_attn"]), OffloadOptions())
    assert any("frees next to nothing" in note for note in seed.notes)


def test_a_region_takes_its_sites() -> None:
    seed = make(RecomputeOptions(Granularity.selective, modules=["mlp", "mlp_act", "mlp_norm"]), FINE)
    layer = seed.plan.layers[0]
    assert layer.regions == {"mlp"}
    assert layer.recompute == {"mlp_norm_out"}
    assert "fc1_out" not in layer.offload
    doubts = {request.name: request.doubt for request in seed.requests if request.action is Action.recompute}
    assert doubts["mlp_act"] == "recompute.modules has mlp, which re-runs all of mlp_act"


@pytest.mark.parametrize(
    ("method", "count", "spans"),
    [
        (Method.uniform, 1, ((0, 1), (1, 2), (2, 3), (3, 4))),
        (Method.uniform, 2, ((0, 2), (2, 4))),
        (Method.uniform, 3, ((0, 3), (3, 4))),
        (Method.block, 1, ((0, 1),)),
        (Method.block, 3, ((0, 1), (1, 2), (2, 3))),
        (Method.block, 9, ((0, 1), (1, 2), (2, 3), (3, 4))),
    ],
)
def test_full(method: Method, count: int, spans: tuple[tuple[int, int], ...]) -> None:
    options = RecomputeOptions(Granularity.full, method=method, num_layers=count)
    assert make(options, OffloadOptions()).plan.spans == spans


def test_full_counts_within_each_pipeline_chunk() -> None:
    block = RecomputeOptions(Granularity.full, method=Method.block, num_layers=1)
    assert make(block, OffloadOptions(), layers=8, chunks=4).plan.spans == ((0, 1), (2, 3), (4, 5), (6, 7))
    uniform = RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=3)
    assert make(uniform, OffloadOptions(), layers=8, chunks=2).plan.spans == ((0, 3), (3, 4), (4, 7), (7, 8))


def test_full_leaves_only_the_regions_input_to_offload() -> None:
    options = RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=2)
    for offload in (FINE, OffloadOptions(OffloadKind.layerwise, num_layers=4)):
        plan = make(options, offload).plan
        assert [layer.offload for layer in plan.layers] == [{"layer_input"}, set(), {"layer_input"}, set()]


def test_recompute_goes_before_offload() -> None:
    seed = make(SELECTIVE, FINE)
    layer = seed.plan.layers[0]
    assert layer.offload == {
        "layer_input",
        "query",
        "key",
        "value",
        "attn_scores",
        "core_attn_out",
        "mlp_residual",
        "fc1_out",
    }
    assert [note for note in seed.notes if note.startswith("offload")] == [
        "offload.modules: left out qkv_linear: it is recomputed, so there is nothing to copy",
        "offload.modules: left out mlp_fc1: it is recomputed, so there is nothing to copy",
    ]
    asked = make(SELECTIVE, replace(FINE, modules=["qkv_linear", "mlp_act"]))
    assert {request.name: bool(request.doubt) for request in asked.requests if request.action is Action.offload} == {
        "qkv_linear": True,
        "mlp_act": False,
    }


def test_min_bytes_is_in_bytes() -> None:
    plan = make(RecomputeOptions(), replace(FINE, min_bytes=128 * MIB)).plan
    assert "query" in plan.layers[0].offload
    assert "key" not in plan.layers[0].offload
    assert plan.min_offload_bytes == 128 * MIB


def test_an_option_of_which_nothing_is_left_is_asked_about() -> None:
    seed = make(SELECTIVE, replace(FINE, min_bytes=1 << 40))
    (request,) = [request for request in seed.requests if request.action is Action.offload]
    assert request.name == "fine_grained"
    assert request.doubt == f"its tensors are smaller than offload.min_bytes={1 << 40}"


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.999, 1.0])
def test_fraction_is_of_the_bytes_first_in_forward_order(fraction: float) -> None:
    def offloaded(plan: Plan) -> list[int]:
        return [sum(SITES[site].bytes_of(LLAMA) for site in layer.offload) for layer in plan.layers]

    whole = offloaded(make(RecomputeOptions(), FINE).plan)
    part = offloaded(make(RecomputeOptions(), replace(FINE, fraction=fraction)).plan)
    largest = max(SITES[site].bytes_of(LLAMA) for site in SITES)
    assert fraction * sum(whole) - largest < sum(part) <= fraction * sum(whole)
    assert part == sorted(part, reverse=True)


def test_layerwise() -> None:
    everything = set(SITES)
    assert [layer.offload for layer in make(RecomputeOptions(), OffloadOptions(OffloadKind.layerwise)).plan.layers] == [
        everything, everything, everything, set(),
    ]  # fmt: skip
    two = OffloadOptions(OffloadKind.layerwise, num_layers=2, double_buffering=True)
    plan = make(RecomputeOptions(), two).plan
    assert [bool(layer.offload) for layer in plan.layers] == [True, True, False, False]
    assert plan.reload_ahead == 1
    assert make(RecomputeOptions(), replace(two, double_buffering=False)).plan.reload_ahead == 0


def test_every_module_names_known_sites_or_a_region() -> None:
    for module in (*RECOMPUTE_MODULES.values(), *OFFLOAD_MODULES.values()):
        assert bool(module.sites) != bool(module.region)
        assert set(module.sites) <= set(SITES)
    assert all(SITES[site].recompute for module in RECOMPUTE_MODULES.values() for site in module.sites)
