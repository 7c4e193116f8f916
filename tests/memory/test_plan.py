from __future__ import annotations

import pytest

from memory.plan import Action, LayerPlan, Plan, PlanError, keep_plan
from memory.sites import LayerShape
from memory.table import plan_table

SHAPE = LayerShape(
    seq_length=1024,
    micro_batch_size=1,
    hidden=512,
    ffn=2048,
    heads=8,
    query_width=512,
    kv_width=512,
    gated=True,
    fused_attention=True,
    element_bytes=2,
)
MIXED = Plan(
    layers=(
        LayerPlan(offload=frozenset({"layer_input"})),
        LayerPlan(),
        LayerPlan(recompute=frozenset({"act_out", "attn_norm_out"}), offload=frozenset({"fc1_out"})),
        LayerPlan(recompute=frozenset({"act_out", "attn_norm_out"}), offload=frozenset({"fc1_out"})),
        LayerPlan(regions=frozenset({"core_attn", "mlp"})),
    ),
    spans=((0, 2),),
    min_offload_bytes=4096,
    reload_ahead=0,
    distribute_saved_activations=True,
)


def test_yaml_holds_all_of_a_plan() -> None:
    assert Plan.from_yaml(MIXED.to_yaml()) == MIXED
    assert Plan.from_yaml(keep_plan(3).to_yaml()) == keep_plan(3)


def test_yaml_names_layers_by_range() -> None:
    assert "layers: 2-3" in MIXED.to_yaml()
    assert "whole_layers: [0-1]" in MIXED.to_yaml()


def test_actions() -> None:
    layer = MIXED.layers[2]
    assert (layer.action("act_out"), layer.action("fc1_out"), layer.action("query")) == (
        Action.recompute,
        Action.offload,
        Action.keep,
    )
    assert MIXED.span_of(1) == (0, 2)
    assert MIXED.span_of(2) is None
    assert keep_plan(2).idle
    assert not MIXED.idle


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not YAML"),
        ("- 1", "the plan: expected keys and values"),
        ("layers: []", "num_layers: expected a whole number of at least 1, found None"),
        ("{num_layers: 2, layer: []}", "unknown name layer; did you mean layers?"),
        ("{num_layers: 2, layers: [{layers: 2, offload: [query]}]}", "2 is outside layers 0 to 1"),
        ("{num_layers: 2, layers: [{layers: 1-0, offload: [query]}]}", "1-0 is outside layers 0 to 1"),
        ("{num_layers: 2, layers: [{layers: all, offload: [query]}]}", "write 3 or 0-7"),
        ("{num_layers: 2, layers: [{offload: [query]}]}", "write 3 or 0-7"),
        ("{num_layers: 2, layers: [{layers: 0, offload: [quary]}]}", "unknown name quary; did you mean query?"),
        ("{num_layers: 2, layers: [{layers: 0, offload: query}]}", "layers[0].offload: expected a list, found str"),
        ("{num_layers: 2, layers: [{layers: 0, regions: [mpl]}]}", "unknown name mpl; did you mean mlp?"),
        ("{num_layers: 2, layers: [{layers: 0-1}, {layers: 1}]}", "layer 1 is also in layers[0]"),
        ("{num_layers: 2, layers: [{layers: 0, recompute: [query]}]}", "query can't be recomputed by itself"),
        (
            "{num_layers: 2, layers: [{layers: 0, recompute: [act_out], offload: [act_out]}]}",
            "act_out under both recompute and offload",
        ),
        (
            "{num_layers: 2, layers: [{layers: 0, offload: [fc1_out], regions: [mlp]}]}",
            "region mlp is re-run whole, so it keeps no fc1_out",
        ),
        ("{num_layers: 2, whole_layers: [0-1, 1]}", "layer 1 is in two spans"),
        ("{num_layers: 2, whole_layers: [0-2]}", "0-2 is outside layers 0 to 1"),
        (
            "{num_layers: 2, whole_layers: [0-1], layers: [{layers: 1, offload: [layer_input]}]}",
            "layer 1 is re-run whole, so it keeps no layer_input",
        ),
        ("{num_layers: 2, min_offload_bytes: -1}", "min_offload_bytes: expected a whole number of at least 0"),
        ("{num_layers: 2, reload_ahead: true}", "reload_ahead: expected a whole number"),
        ("{num_layers: 2, distribute_saved_activations: 1}", "distribute_saved_activations: write true or false"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text)
    assert says in str(caught.value)


def test_table() -> None:
    header, rows = plan_table(MIXED, SHAPE)
    assert header == ["site", "MiB", "layers 0", "layers 1", "layers 2-3", "layers 4"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["layer_input"] == ["1.00", "offload", "·", "keep", "keep"]
    assert cells["act_out"] == ["4.00", "·", "·", "recompute", "·"]
    assert cells["query"] == ["1.00", "·", "·", "keep", "keep"]
    assert cells["attn_scores"][-1] == "·"
    assert cells["regions"] == ["", "2 layers as one", "of 2", "", "core_attn mlp"]


def test_table_groups_layers_that_do_the_same() -> None:
    odd = LayerPlan(offload=frozenset({"fc1_out"}))
    plan = Plan(layers=tuple(odd if number % 2 or number > 4 else LayerPlan() for number in range(8)))
    header, rows = plan_table(plan, SHAPE)
    assert header[2:] == ["layers 0,2,4", "layers 1,3,5-7"]
    assert "regions" not in [row[0] for row in rows]
