"""What Megatron itself refuses, breaks on or ignores: rules of engine=megatron alone. Imports no torch.

Sources are megatron-core's TransformerConfig.__post_init__ and, marked so, megatron.training's argument parser, whose
rules a program that builds its own TransformerConfig would otherwise miss.
"""

from __future__ import annotations

from collections.abc import Iterator

from memory.options import Granularity, OffloadKind, OffloadOptions
from memory.sites import OFFLOAD_MODULES, RECOMPUTE_MODULES
from models.config import Attention
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.schema import Config, Engine, PlanSource

#: of the names that mean something on a dense model, those that Megatron has too
RECOMPUTED = ("core_attn", "layernorm", "mlp")
OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
_STASH = "Write engine=stash"
#: from here on Transformer Engine offloads weights too unless told to use its first offloading code
_TE_NEW_OFFLOAD = (2, 10)
_DEFAULT_MIN_BYTES = OffloadOptions().min_bytes


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    if config.engine.name is not Engine.megatron:
        return
    if config.plan.source is not PlanSource.options:
        yield ConfigError("engine.name", "Megatron's switches can't follow a plan", f"{_STASH} or plan=options")
    if config.model.attention is Attention.sdpa:
        yield ConfigError(
            "model.attention",
            "sdpa is not among Megatron's attention modules",
            "Write model.attention=auto, or engine=stash",
        )
    if config.parallel.sequence_parallel and not (machine.has_te and machine.has_cuda):
        yield ConfigError(
            "parallel.sequence_parallel",
            f"Megatron's own norms refuse it without Transformer Engine: {machine.lacking()}",
            f"{_STASH} or parallel.sequence_parallel=false",
        )
    if config.recompute.granularity is Granularity.selective:
        yield from _selective(config, machine)
    if config.offload.kind is not OffloadKind.none:
        yield from _offload(config, machine)


def _selective(config: Config, machine: Machine) -> Iterator[ConfigError]:
    names = config.recompute.modules or []
    yield from _only("recompute.modules", names, RECOMPUTED)
    if "mlp" in names and config.model.bias:
        yield ConfigError(
            "recompute.modules",
            "with model.bias=true Megatron's mlp recomputes itself without end in backward",
            f"{_STASH}, model.bias=false, or drop mlp",
        )
    if "layernorm" in names and config.strict and machine.has_te and machine.has_cuda:
        yield ConfigError(
            "recompute.modules",
            "Megatron's layers fuse the norms into the linear layers, so layernorm acts on nothing",
            f"{_STASH} or strict=false",
        )


def _offload(config: Config, machine: Machine) -> Iterator[ConfigError]:
    if not (machine.has_te and machine.has_cuda):
        yield ConfigError(
            "offload", f"Megatron's offloading needs a GPU with Transformer Engine: {machine.lacking()}", _STASH
        )
    if config.offload.kind is OffloadKind.layerwise:
        yield from _layerwise(config)
    else:
        yield from _fine_grained(config, machine)


def _layerwise(config: Config) -> Iterator[ConfigError]:
    if config.recompute.granularity is not Granularity.none:
        yield ConfigError(
            "offload", "Megatron refuses layerwise offloading with any recomputation", f"{_STASH} or recompute=none"
        )
    if config.parallel.pipeline > 1:
        yield ConfigError(
            "offload", "Megatron refuses layerwise offloading with pipeline stages", f"{_STASH} or parallel.pipeline=1"
        )
    if config.offload.double_buffering:
        yield ConfigError("offload.double_buffering", "Transformer Engine ignores it", f"{_STASH} or drop it")
    if config.offload.min_bytes != _DEFAULT_MIN_BYTES:
        yield ConfigError("offload.min_bytes", "Transformer Engine has a least size of its own", f"{_STASH} or drop it")


def _fine_grained(config: Config, machine: Machine) -> Iterator[ConfigError]:
    names = list(OFFLOADED) if config.offload.modules is None else config.offload.modules
    yield from _only("offload.modules", names, OFFLOADED)
    if "attn_proj" in names and "core_attn" not in names:
        yield ConfigError(
            "offload.modules", "Megatron's attn_proj goes only together with core_attn", f"{_STASH} or add core_attn"
        )
    if config.recompute.granularity is Granularity.full:
        yield ConfigError(
            "offload",
            "Megatron accepts fine-grained offloading with recompute=full and then offloads the wrong groups",
            f"{_STASH}, recompute=selective or offload=none",
        )
    # Megatron's own default of recompute.modules is core_attn
    selective = config.recompute.granularity is Granularity.selective
    if selective and "core_attn" in (config.recompute.modules or ["core_attn"]):
        clash = [name for name in ("core_attn", "attn_proj") if name in names]
        if clash:
            yield ConfigError(
                "offload.modules",
                f"Megatron recomputes core_attn (recompute.modules), so it never offloads {' and '.join(clash)}",
                f"{_STASH}, or name other modules in one of the two",
            )
    version = machine.te_version
    if version and version >= _TE_NEW_OFFLOAD and machine.environment.get("NVTE_CPU_OFFLOAD_V1") != "1":
        # argument parser
        yield ConfigError(
            "offload",
            f"Transformer Engine {'.'.join(map(str, version))} may offload weights too",
            "Set NVTE_CPU_OFFLOAD_V1=1 in the environment",
        )


def _only(key: str, names: list[str], offered: tuple[str, ...]) -> Iterator[ConfigError]:
    ours = RECOMPUTE_MODULES if key.startswith("recompute") else OFFLOAD_MODULES
    for name in names:
        if name in ours and name not in offered:
            yield ConfigError(key, f"Megatron has no {name}", f"{_STASH}, or choose among {', '.join(offered)}")
