"""Which layers Megatron's own switches act on, read off the built modules: several of them do nothing in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from memory.engine.census import Effect
from memory.plan import Action

#: (action, module name) -> whether this layer does it
_FLAGS: Mapping[tuple[Action, str], Callable[[Any], bool]] = {
    (Action.recompute, "core_attn"): lambda layer: layer.self_attention.checkpoint_core_attention,
    (Action.recompute, "layernorm"): lambda layer: layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm,
    (Action.recompute, "mlp"): lambda layer: layer.recompute_mlp,
    (Action.offload, "attn_norm"): lambda layer: layer.offload_attn_norm,
    (Action.offload, "mlp_norm"): lambda layer: layer.offload_mlp_norm,
    (Action.offload, "qkv_linear"): lambda layer: layer.self_attention.offload_qkv_linear,
    (Action.offload, "core_attn"): lambda layer: layer.self_attention.offload_core_attention,
    (Action.offload, "attn_proj"): lambda layer: layer.self_attention.offload_attn_proj,
}
_FUSED_NORM = "the norms are fused into the linear layers of Megatron's stock spec; engine=stash has them apart"


def native_effects(chunks: Sequence[Any], switches: Mapping[str, Any]) -> list[Effect]:
    """Effects of these TransformerConfig fields on the chunks of one rank; Megatron does not tell the bytes."""
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    effects = []
    granularity = switches.get("recompute_granularity")
    if granularity == "full":
        block = switches["recompute_method"] == "block"
        acted = sum(min(switches["recompute_num_layers"], len(chunk.decoder.layers)) for chunk in chunks)
        effects.append(Effect(Action.recompute, "full", acted if block else len(layers), None, ""))
    if granularity == "selective":
        for name in switches.get("recompute_modules", ["core_attn"]):
            effects.append(_module_effect(layers, Action.recompute, name))
    for name in switches.get("offload_modules", ()):
        effects.append(_module_effect(layers, Action.offload, name))
    if switches.get("cpu_offloading"):
        effects.append(Effect(Action.offload, "layerwise", switches["cpu_offloading_num_layers"], None, ""))
    return effects


def _module_effect(layers: Sequence[Any], action: Action, name: str) -> Effect:
    acted = sum(bool(_FLAGS[action, name](layer)) for layer in layers)
    fused = any(isinstance(layer.input_layernorm, IdentityOp) for layer in layers)
    return Effect(
        action, name, acted, None, "" if acted else _FUSED_NORM if fused and "norm" in name else "no layer has it"
    )
