"""The keys and names that exist, and the nearest of them to what was typed. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from trainer.config.schema import Config

#: names that Megatron's TransformerConfig and command line have for keys of ours; a key that is renamed goes here too
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "recompute_granularity": "recompute.granularity",
        "recompute_modules": "recompute.modules",
        "recompute_method": "recompute.method",
        "recompute_num_layers": "recompute.num_layers",
        "distribute_saved_activations": "recompute.distribute_saved_activations",
        "fine_grained_activation_offloading": "offload.kind",
        "offload_modules": "offload.modules",
        "min_offloaded_tensor_size": "offload.min_bytes",
        "activation_offload_fraction": "offload.fraction",
        "cpu_offloading": "offload.kind",
        "cpu_offloading_num_layers": "offload.num_layers",
        "cpu_offloading_activations": "offload.activations",
        "cpu_offloading_weights": "offload.weights",
        "cpu_offloading_double_buffering": "offload.double_buffering",
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
        "context_parallel_size": "parallel.context",
        "expert_model_parallel_size": "parallel.expert",
        "sequence_parallel": "parallel.sequence_parallel",
        "overlap_p2p_comm": "parallel.overlap_p2p_comm",
        "add_bias_linear": "model.bias",
        "add_qkv_bias": "model.qkv_bias",
        "gated_linear_unit": "model.activation",
        "activation_func": "model.activation",
        "bf16": "trainer.precision",
        "deterministic_mode": "trainer.deterministic",
        "use_distributed_optimizer": "parallel.distributed_optimizer",
        "untie_embeddings_and_output_weights": "model.tied_embeddings",
        "max_position_embeddings": "model.seq_length",
        "train_iters": "trainer.steps",
        "eval_iters": "trainer.eval_batches",
        "eval_interval": "trainer.eval_every",
        "log_interval": "trainer.log_every",
        "save_interval": "trainer.checkpoint_every",
        "lr_warmup_iters": "optim.warmup_steps",
        "lr_decay_style": "optim.decay_style",
        "lr_decay_iters": "trainer.schedule_steps",
        "wandb_project": "logger.project",
    }
)


@cache
def sections() -> tuple[str, ...]:
    """Keys that hold other keys, as model and trainer."""
    return tuple(name for name, hint in get_type_hints(Config).items() if dataclasses.is_dataclass(hint))


@cache
def leaf_types() -> dict[str, Any]:
    """Every key that holds a value, in dotted form, with its annotated type."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(Config).items():
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{inner}": leaf for inner, leaf in get_type_hints(hint).items()}
        else:
            found[name] = hint
    return found


def is_free_form(key: str) -> bool:
    """Whether a key lies in a dictionary that takes any name, as model.extras.<field>."""
    return any(get_origin(hint) is dict and key.startswith(f"{leaf}.") for leaf, hint in leaf_types().items())


def nearest(typed: str, known: Iterable[str]) -> str | None:
    """The known name most like the typed one, or None if none is like it."""
    found = difflib.get_close_matches(typed, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(typed: str) -> str | None:
    """The key most like the typed one: by another name, in its section, by its last part (lr -> optim.lr), at all."""
    keys = [*leaf_types(), *sections()]
    section, _, last = typed.rpartition(".")
    if last in RENAMED:
        return RENAMED[last]
    if section in sections():
        inside = nearest(last, [key.split(".", 1)[1] for key in leaf_types() if key.startswith(f"{section}.")])
        if inside:
            return f"{section}.{inside}"
    by_last = [key for key in leaf_types() if key.rpartition(".")[2] == last]
    if by_last:
        return nearest(typed, by_last) or by_last[0]
    # below a known section the shared prefix alone would make any key look near
    return None if section in sections() else nearest(typed, keys)


def nearest_key_text(typed: str) -> str:
    """A sentence that points from a wrong key to a right one."""
    key = nearest_key(typed)
    if key:
        return f"Did you mean {key}?"
    section = typed.split(".")[0]
    if section in sections():
        names = ", ".join(leaf.split(".", 1)[1] for leaf in leaf_types() if leaf.startswith(f"{section}."))
        return f"Keys of {section}: {names}"
    return f"Sections: {', '.join(sections())}; `python train.py --cfg job` prints all keys"


def choices_text(typed: str, known: Sequence[str]) -> str:
    """A sentence that names the nearest choice and then all of them."""
    near = nearest(typed, known)
    listed = f"Choices: {', '.join(known)}"
    return f"Did you mean {near}? {listed}" if near else listed


def unwrapped(hint: Any) -> Any:
    """The type inside Optional[...]; any other type as it is."""
    inner = [arg for arg in get_args(hint) if arg is not type(None)]
    return inner[0] if type(None) in get_args(hint) and len(inner) == 1 else hint
