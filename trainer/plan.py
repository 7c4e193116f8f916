"""From a configuration to the plan it asks for. Imports no torch, so that it can be shown before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memory.options import Granularity, OffloadKind
from memory.plan import Plan, PlanError
from memory.seed import Seed, seed_plan
from memory.sites import LayerShape
from memory.table import plan_table
from models.config import Attention
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, Engine, PlanSource, Precision
from trainer.config.search_path import CONF, libraries

#: what fine-grained offload can name on Megatron's dense layers
_NATIVE_OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


def layer_chunks(
    num_layers: int, pipeline: int = 1, virtual_pipeline: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The layers of each model chunk in forward order, as Megatron deals them out: stage by stage, then round again."""
    count = num_layers // (pipeline * (virtual_pipeline or 1))
    return tuple(tuple(range(first, first + count)) for first in range(0, num_layers, count))


def layer_shape(config: Config, has_cuda: bool) -> LayerShape:
    """Sizes of one layer on one rank for one micro-batch."""
    model, parallel = config.model, config.parallel
    # Without a GPU torch's scaled_dot_product_attention takes its plain path for dropout, and that stores the scores.
    stores_scores = model.attention is Attention.unfused or (model.attention_dropout > 0 and not has_cuda)
    return LayerShape(
        seq_length=model.seq_length,
        micro_batch_size=config.trainer.micro_batch_size,
        hidden=model.hidden_size,
        ffn=model.ffn,
        heads=model.num_attention_heads,
        query_width=model.query_width,
        kv_width=model.kv_width,
        gated=model.gated,
        fused_attention=not stores_scores,
        element_bytes=2 if uses_bf16(config.trainer.precision, has_cuda) else 4,
        tensor_parallel=parallel.tensor,
        context_parallel=parallel.context,
        sequence_parallel=parallel.sequence_parallel,
    )


def uses_bf16(precision: Precision, has_cuda: bool) -> bool:
    return has_cuda if precision is Precision.auto else precision is Precision.bf16


def plans_for_gpu(config: Config, has_cuda: bool) -> bool:
    """Whether to plan for a GPU: there is one, or a laptop plans for the one that the hardware group names."""
    return has_cuda or config.hardware.name not in ("auto", "cpu")


def make_seed(config: Config, has_cuda: bool) -> Seed:
    """The plan and what to say about it. Raises ConfigError when plan.path holds no plan for this model."""
    if config.plan.source is PlanSource.file:
        return Seed(read_plan(config), (), ())
    parallel = config.parallel
    chunks = layer_chunks(config.model.num_layers, parallel.pipeline, parallel.virtual_pipeline)
    return seed_plan(config.recompute, config.offload, layer_shape(config, has_cuda), chunks)


def read_plan(config: Config) -> Plan:
    """The plan of plan.path. Raises ConfigError when it is not there, not a plan, or of another model."""
    if config.plan.path is None:
        raise ConfigError("plan.path", "plan=file needs one", "Add plan.path=FILE, a plan.yaml as each run writes it")
    path = _plan_file(config.plan.path)
    if not path.is_file():
        raise ConfigError("plan.path", f"there is no file {path}", "Give a file as each run writes it to plan.yaml")
    try:
        plan = Plan.from_yaml(path.read_text(encoding="utf-8"))
    except (PlanError, UnicodeDecodeError) as error:
        raise ConfigError(
            "plan.path", f"{path} is no plan: {error}", "Compare it with the plan.yaml of a run"
        ) from None
    if len(plan.layers) != config.model.num_layers:
        raise ConfigError(
            "plan.path",
            f"the plan is for {len(plan.layers)} layers, the model has {config.model.num_layers}",
            f"Set model.num_layers={len(plan.layers)} or write a plan for this model",
        )
    parallel = config.parallel
    starts = [chunk[0] for chunk in layer_chunks(len(plan.layers), parallel.pipeline, parallel.virtual_pipeline)]
    for first, past in plan.spans:
        torn = [start for start in starts if first < start < past]
        if torn:
            raise ConfigError(
                "plan.path",
                f"whole_layers {first}-{past - 1} of {path} goes over a pipeline boundary at layer {torn[0]}",
                f"End that span at layer {torn[0] - 1}",
            )
    return plan


def _plan_file(name: str) -> Path:
    """A file of the user's, or else one of ours or of a team's library."""
    kept = [folder / "plans" / name for folder in (CONF, *(library.folder for library in libraries()))]
    return next((path for path in (Path(name), *kept) if path.is_file()), Path(name))


@dataclass(frozen=True)
class ShownPlan:
    """What a person is shown of a configuration's plan, and what plan.yaml holds."""

    yaml: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def shown_plan(config: Config, has_cuda: bool) -> ShownPlan:
    """Raises ConfigError as make_seed does."""
    if config.engine.name is Engine.megatron:
        switches = megatron_switches(config, has_cuda)
        head = "# engine=megatron: no plan of ours; these fields of TransformerConfig decide.\n"
        text = yaml.safe_dump(switches, sort_keys=False)
        return ShownPlan(head + text, ["TransformerConfig", ""], [[k, str(v)] for k, v in switches.items()], ())
    seed = make_seed(config, has_cuda)
    header, rows = plan_table(seed.plan, layer_shape(config, has_cuda))
    return ShownPlan(seed.plan.to_yaml(), header, rows, seed.notes)


def megatron_switches(config: Config, has_cuda: bool) -> dict[str, Any]:
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
        element_bytes = 2 if uses_bf16(config.trainer.precision, has_cuda) else 4
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
