from __future__ import annotations

from memory.plan import LayerPlan, Plan
from models.flops import FlopsPerToken
from trainer.report.recomputed import recomputed_flops_per_token

#: forward FLOPs of one of the four layers: MLP 30 (fc1 20 where gated), projections 7, attention core 5
FLOPS = FlopsPerToken(mlp=4 * 3 * 30, attention_linear=4 * 3 * 7, attention_core=4 * 3 * 5, logits=999)


def again(*layers: LayerPlan, spans: tuple[tuple[int, int], ...] = (), gated: bool = True) -> dict[str, float]:
    plan = Plan(layers=layers + (LayerPlan(),) * (4 - len(layers)), spans=spans)
    return dict(recomputed_flops_per_token(plan, FLOPS, 4, gated))


def test_each_option_by_hand() -> None:
    free = LayerPlan(recompute=frozenset({"act_out", "attn_norm_out", "mlp_norm_out"}))
    fc1 = LayerPlan(recompute=frozenset({"fc1_out", "act_out"}))
    assert again() == again(free, free) == {}
    assert again(fc1, fc1) == {"fc1_out": 40}
    assert again(fc1, gated=False) == {"fc1_out": 15}
    assert again(LayerPlan(regions=frozenset({"core_attn", "mlp"})), fc1) == {"core_attn": 5, "mlp": 30, "fc1_out": 20}
    assert again(spans=((0, 2), (3, 4))) == {"layer": 3 * 42}
