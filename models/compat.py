"""What depends on which Megatron is installed (0.16.1 to 0.19.x), and the workarounds for its faults."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig


def version() -> str:
    """The installed megatron-core's version."""
    return str(megatron.core.__version__)


def transformer_config(values: dict[str, Any]) -> TransformerConfig:
    """TransformerConfig(**values), without 0.16.1's warning of the default that it gives cuda_graph_scope itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return TransformerConfig(**values)


def check_fields(names: Iterable[str], key: str) -> None:
    """Raise ValueError for a name that the installed TransformerConfig lacks; `key` is where the user set it."""
    known = [field.name for field in fields(TransformerConfig)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see its documentation for the fields it has"
            raise ValueError(f"{key}.{name}: megatron-core {version()}'s TransformerConfig has no such field; {hint}")


@dataclass(frozen=True)
class Patch:
    """A repair of an upstream fault. `faulty()` asks the unpatched code: False means that upstream mended it."""

    fault: str
    faulty: Callable[[], bool]
    apply: Callable[[], None]


_checkpoint_init = CheckpointWithoutOutput.__init__


def _plain_checkpoint_is_fp8() -> bool:
    checkpoint = CheckpointWithoutOutput.__new__(CheckpointWithoutOutput)
    _checkpoint_init(checkpoint, fp8=False)
    return bool(checkpoint.fp8)


def _repair_checkpoint_fp8() -> None:
    def init(self: Any, fp8: Any = False, *args: Any, **kwargs: Any) -> None:
        _checkpoint_init(self, fp8, *args, **kwargs)
        self.fp8 = bool(fp8)

    CheckpointWithoutOutput.__init__ = init


_set_optimizer_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _step_is_missed() -> bool:
    """Load one parameter's states, as load_parameter_state_from_fully_reshardable does, over torch's Adam."""
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    parameter = torch.zeros(1)
    states = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1)}
    optimizer.config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
    optimizer.model_param_group_index_map = {parameter: (0, 0)}
    optimizer.optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}], state={parameter: states})
    try:
        _set_optimizer_states(optimizer, parameter, {"param": parameter, "exp_avg": torch.ones(1)})
    except KeyError:
        return True
    return False


def _repair_step() -> None:
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # load_state_dict has put the step in place already
        own = self._get_main_param_and_optimizer_states(model_param)
        _set_optimizer_states(self, model_param, {**{k: own[k] for k in ("step",) if k in own}, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


PATCHES = (
    Patch(
        fault="DistributedOptimizer can't load a fully_reshardable checkpoint into torch's Adam: KeyError 'step'",
        faulty=_step_is_missed,
        apply=_repair_step,
    ),
    Patch(
        fault="CheckpointWithoutOutput(fp8=False).fp8 is True, so that selective layernorm needs Transformer Engine",
        faulty=_plain_checkpoint_is_fp8,
        apply=_repair_checkpoint_fp8,
    ),
)


class _StartsWith(logging.Filter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.prefix)


def mute(logger: str, prefix: str) -> None:
    """Drop the messages of this logger that begin with prefix."""
    target = logging.getLogger(logger)
    if not any(isinstance(f, _StartsWith) and f.prefix == prefix for f in target.filters):
        target.addFilter(_StartsWith(prefix))


def apply() -> None:
    """Apply every patch that the installed version needs, and mute what it says to other audiences. May be repeated."""
    for patch in PATCHES:
        if patch.faulty():
            patch.apply()
    # 0.16.1 knows its own MLP class only; ours finds the tensor-parallel group by itself.
    mute("megatron.core.transformer.transformer_layer", "Unknown MLP type")
    # 0.19: GPTModel gets critical fixes only. models/builder.py is the one place that builds it.
    mute("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED")
