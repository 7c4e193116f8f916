"""From the memory options of a configuration to an engine at work on this rank's model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from memory.engine.census import Effect
from memory.engine.engine import MemoryEngine
from memory.engine.ledger import StepBytes
from memory.engine.meter import LinkUse
from memory.engine.native import native_effects
from memory.options import Granularity
from memory.plan import Action, Plan
from trainer import plan
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, Engine, PlanSource
from trainer.report.observer import EffectRow
from trainer.shape import layer_shape

#: share of the node's free memory that offloading may lock, all its ranks together
_HOST_SHARE = 0.8


class RunMemory:
    """A plan (engine=stash) or Megatron's own switches (engine=megatron) on this rank, and what they did."""

    def __init__(self, config: Config, chunks: Sequence[torch.nn.Module]) -> None:
        """Wraps the layers of this rank's model chunks.

        Raises:
            ConfigError: the host memory that the plan needs can't be had.
        """
        self._strict = config.strict
        self.chunks = chunks
        self._switches = megatron_switches(config)
        self._native = config.engine.name is Engine.megatron
        has_cuda = torch.cuda.is_available()
        seed = plan.make_seed(config, has_cuda)
        if config.plan.source is PlanSource.auto:
            seed = dataclasses.replace(seed, plan=_of_first_rank(seed.plan))
        self._applied = seed.plan
        #: what the configuration asks for; None: Megatron's own switches act
        self.plan = None if self._native else seed.plan
        #: what is recomputed, whoever does it
        self.equivalent_plan = plan.make_seed(_as_megatron(config), has_cuda).plan if self._native else seed.plan
        self.host_limit_bytes = _host_limit_bytes(config)
        self._engine = MemoryEngine(
            self.plan,
            seed.requests,
            host_bytes=0 if self._native else _host_bytes(config, seed.plan, chunks),
            host_limit_bytes=self.host_limit_bytes,
        )
        try:
            self._engine.attach(chunks)
        except MemoryError as error:
            raise ConfigError(
                "offload", str(error), "Offload less (fraction, modules, num_layers) or raise offload.host_limit_gib"
            ) from None

    @property
    def plan_now(self) -> Plan:
        """The plan in force; not for engine=megatron."""
        return self._applied

    def switch(self, plan: Plan) -> None:
        """Between steps: go on under another plan. Not for engine=megatron: its switches act on building a model."""
        self._applied = plan
        self._engine.switch(plan)
        if torch.cuda.is_available():
            # blocks cut for the other plan's tensors would count as fragmentation of this one's
            torch.cuda.empty_cache()

    def begin_step(self, metered: bool) -> None:
        self._engine.begin_step(metered)

    def end_step(self) -> StepBytes:
        return self._engine.end_step()

    def link_use(self) -> LinkUse:
        return self._engine.link_use()

    def census_rows(self) -> list[tuple[int, str, Action, int, int]]:
        """What the last step did: (layer, site, action, bytes, tensors)."""
        return self._engine.census.rows()

    @property
    def held_bytes(self) -> int:
        """Held for backward now: 0 between steps."""
        return self._engine.held_bytes

    @property
    def host_pool_bytes(self) -> int:
        return self._engine.host_pool_bytes

    def effects(self) -> Sequence[EffectRow]:
        """What each option did in the last step. Raises ConfigError under strict=true where one did nothing."""
        found = native_effects(self.chunks, self._switches) if self._native else self._engine.effects()
        idle = next((effect for effect in found if not effect.layers), None)
        if idle and self._strict:
            raise ConfigError(
                _key(idle),
                f"{idle.name} did nothing: {idle.reason}",
                "Drop it, or go on all the same with strict=false",
            )
        return [EffectRow(e.name, e.action.value, e.layers, e.bytes, e.reason) for e in found]


def megatron_switches(config: Config) -> dict[str, Any]:
    return plan.megatron_switches(config, torch.cuda.is_available())


def _as_megatron(config: Config) -> Config:
    """Unless told, Megatron's selective recomputation is of core_attn alone (TransformerConfig.recompute_modules)."""
    recompute = config.recompute
    if recompute.granularity is Granularity.selective and recompute.modules is None:
        return dataclasses.replace(config, recompute=dataclasses.replace(recompute, modules=["core_attn"]))
    return config


def _key(effect: Effect) -> str:
    return (
        effect.action.value
        if effect.name in ("full", "layerwise", "fine_grained")
        else f"{effect.action.value}.modules"
    )


def _of_first_rank(found: Plan) -> Plan:
    """All ranks follow one plan, also where their caches or libraries made them find different ones. Collective."""
    plans = [found]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(plans, src=0)
    return plans[0]


def _host_bytes(config: Config, applied: Plan, chunks: Sequence[Any]) -> int:
    """What the plan offloads on this rank while the most micro-batches are between forward and backward (1F1B)."""
    layers = [layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers]
    in_flight = config.parallel.pipeline - parallel_state.get_pipeline_model_parallel_rank()
    return in_flight * applied.offload_bytes(layer_shape(config, torch.cuda.is_available()), layers)


def _host_limit_bytes(config: Config) -> int:
    """Page-locked bytes that this rank may take: offload.host_limit_gib, or its part of what the node has free."""
    if config.offload.host_limit_gib is not None:
        return int(config.offload.host_limit_gib * (1 << 30))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(psutil.virtual_memory().available * _HOST_SHARE) // ranks_here
