"""From the memory options of a configuration to an engine at work on this rank's model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from memory.engine.census import Effect
from memory.engine.engine import MemoryEngine
from memory.engine.ledger import StepBytes
from memory.engine.native import native_effects
from memory.options import Granularity, OffloadKind
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, Engine
from trainer.plan import make_seed, uses_bf16
from trainer.report.observer import EffectRow

#: share of the node's free memory that offloading may lock, all its ranks together
_HOST_SHARE = 0.8


#: what fine-grained offload can name on Megatron's dense layers
_NATIVE_OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


class RunMemory:
    """A plan (engine=stash) or Megatron's own switches (engine=megatron), and what they did."""

    def __init__(self, config: Config) -> None:
        self._strict = config.strict
        self._switches = megatron_switches(config)
        self._chunks: Sequence[torch.nn.Module] = ()
        seed = make_seed(config, torch.cuda.is_available())
        self._native = config.engine.name is Engine.megatron
        self._engine = MemoryEngine(
            None if self._native else seed.plan, seed.requests, host_limit_bytes=_host_limit_bytes(config)
        )

    def attach(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._engine.attach(chunks)

    def begin_step(self) -> None:
        self._engine.begin_step()

    def end_step(self) -> StepBytes:
        return self._engine.end_step()

    def effects(self) -> Sequence[EffectRow]:
        """What each option did in the last step. Raises ConfigError under strict=true where one did nothing."""
        found = native_effects(self._chunks, self._switches) if self._native else self._engine.effects()
        idle = next((effect for effect in found if not effect.layers), None)
        if idle and self._strict:
            raise ConfigError(
                _key(idle),
                f"{idle.name} did nothing: {idle.reason}",
                "Drop it, or go on all the same with strict=false",
            )
        return [EffectRow(e.name, e.action.value, e.layers, e.bytes, e.reason) for e in found]


def build_memory(config: Config, chunks: Sequence[torch.nn.Module]) -> RunMemory:
    return RunMemory(config)


def megatron_switches(config: Config) -> dict[str, Any]:
    """The memory options as fields of Megatron's TransformerConfig for engine=megatron; none for ours."""
    recompute, offload = config.recompute, config.offload
    switches: dict[str, Any] = {}
    if config.engine.name is not Engine.megatron:
        return switches
    if recompute.granularity is not Granularity.none:
        switches["recompute_granularity"] = recompute.granularity.value
        switches["distribute_saved_activations"] = recompute.distribute_saved_activations
    if recompute.granularity is Granularity.selective and recompute.modules is not None:
        switches["recompute_modules"] = list(recompute.modules)
    if recompute.granularity is Granularity.full:
        switches["recompute_method"] = recompute.method.value if recompute.method else "uniform"
        switches["recompute_num_layers"] = recompute.num_layers or 1
    if offload.kind is OffloadKind.fine_grained:
        element_bytes = 2 if uses_bf16(config.trainer.precision, torch.cuda.is_available()) else 4
        switches["fine_grained_activation_offloading"] = True
        switches["offload_modules"] = list(_NATIVE_OFFLOAD_MODULES if offload.modules is None else offload.modules)
        switches["min_offloaded_tensor_size"] = offload.min_bytes // element_bytes
        if offload.fraction < 1:
            switches["activation_offload_fraction"] = offload.fraction
    if offload.kind is OffloadKind.layerwise:
        all_but_last = config.model.num_layers - 1
        switches["cpu_offloading"] = True
        switches["cpu_offloading_num_layers"] = all_but_last if offload.num_layers is None else offload.num_layers
        switches["cpu_offloading_activations"] = offload.activations
        switches["cpu_offloading_weights"] = offload.weights
        switches["cpu_offloading_double_buffering"] = offload.double_buffering
    return switches


def _key(effect: Effect) -> str:
    return effect.action.value if effect.name in ("full", "layerwise") else f"{effect.action.value}.modules"


def _host_limit_bytes(config: Config) -> int:
    """Page-locked bytes that this rank may take: offload.host_limit_gib, or its part of what the node has free."""
    if config.offload.host_limit_gib is not None:
        return int(config.offload.host_limit_gib * (1 << 30))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(psutil.virtual_memory().available * _HOST_SHARE) // ranks_here
