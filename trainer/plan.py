"""From a configuration to the plan it asks for. Imports no torch, so that it can be shown before anything is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memory.options import Granularity, OffloadKind
from memory.plan import Plan, PlanError
from memory.seed import Seed, seed_plan
from memory.table import plan_table
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, Engine, PlanSource
from trainer.config.search_path import CONF, libraries
from trainer.estimate import as_json, auto_decision, estimate, lines
from trainer.shape import layer_chunks, layer_shape, uses_bf16

#: what fine-grained offload can name on Megatron's dense layers
_NATIVE_OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


def make_seed(config: Config, has_cuda: bool) -> Seed:
    """The plan and what to say about it.

    Raises ConfigError when plan.path holds no plan for this model, or no plan fits plan.budget.
    """
    if config.plan.source is PlanSource.file:
        return Seed(read_plan(config), (), ())
    if config.plan.source is PlanSource.auto:
        return Seed(auto_decision(config, has_cuda).prediction.plan, (), ())
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


def estimate_lines(config: Config, has_cuda: bool) -> list[str]:
    """What the configuration will take, for validate_only; nothing where there is no figure to reckon with."""
    if config.engine.name is Engine.megatron or (not has_cuda and config.plan.source is not PlanSource.auto):
        return []
    return ["", *lines(estimate(config, make_seed(config, has_cuda).plan, has_cuda))]


def write_estimate(config: Config, has_cuda: bool, folder: Path) -> None:
    """estimate.json of a run; none for engine=megatron, whose switches are not reckoned with."""
    if config.engine.name is Engine.megatron:
        return
    found = as_json(estimate(config, make_seed(config, has_cuda).plan, has_cuda))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "estimate.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


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
