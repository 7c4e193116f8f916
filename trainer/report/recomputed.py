"""What a plan makes backward do again, in FLOPs: the difference between MFU and HFU. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from memory.plan import LayerPlan, Plan
from models.flops import FlopsPerToken

#: a forward pass is one of the three passes that FlopsPerToken counts
_PASSES = 3


def recomputed_flops_per_token(plan: Plan, flops: FlopsPerToken, num_layers: int, gated: bool) -> Mapping[str, float]:
    """Forward FLOPs of one token that are done twice, over all layers, by site or region ("layer": whole layers).

    Matrix products only, as in `flops`: norms and activations count nothing. num_layers, gated: of the model.
    """
    mlp, core = (part / _PASSES / num_layers for part in (flops.mlp, flops.attention_core))
    whole = mlp + core + flops.attention_linear / _PASSES / num_layers
    # fc1 holds two of a gated MLP's three matrices
    fc1 = mlp * (2 / 3 if gated else 1 / 2)

    def of_layer(layer: LayerPlan) -> Mapping[str, float]:
        costs = {"core_attn": core, "mlp": mlp}
        again = {region: costs[region] for region in layer.regions}
        return again | ({"fc1_out": fc1} if "fc1_out" in layer.recompute else {})

    total: dict[str, float] = {}
    for number, layer in enumerate(plan.layers):
        inside_span = plan.span_of(number) is not None
        for name, cost in ({"layer": whole} if inside_span else of_layer(layer)).items():
            total[name] = total.get(name, 0.0) + cost
    return total
