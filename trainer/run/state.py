"""All that a run must find again to go on to the bit: weights, optimizer, schedule, generators, position, identity."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from trainer.config.schema import Config, OptimizerName
from trainer.run.optimizer import settings_of
from trainer.shape import uses_bf16

#: of the model group: what a trained model's weights do not depend on
_FREE_MODEL_KEYS = frozenset(
    {"name", "attention", "loss_head", "attention_dropout", "hidden_dropout", "init_method_std"}
)


def fingerprint(config: Config, *, world_size: int, vocab_size: int, samples_in_pass: int) -> dict[str, Any]:
    """What two runs must share for one to go on from the other's checkpoint, by configuration key, as plain JSON.

    Not in it, so free to change: the learning rate and its schedule, the batch size, where the data lie, and all memory
    options.
    """
    model = {f"model.{key}": value for key, value in plain(config.model).items() if key not in _FREE_MODEL_KEYS}
    return {
        **model,
        "model.vocab_size": vocab_size,
        "data.source": config.data.source.value,
        "data.opener": config.data.opener,
        "samples in one pass of the data": samples_in_pass,
        "data.tokenizer": config.data.tokenizer,
        "data.split": config.data.split,
        "engine.name": config.engine.name.value,
        "optim.name": config.optim.name.value,
        "trainer.seed": config.trainer.seed,
        "trainer.precision": "bf16" if uses_bf16(config.trainer.precision, torch.cuda.is_available()) else "fp32",
        "parallel.distributed_optimizer": config.parallel.distributed_optimizer,
        **({} if reshards(config) else layout(config, world_size)),
    }


def layout(config: Config, world_size: int) -> dict[str, Any]:
    """How a run is split over processes. Another one may go on from its checkpoint, with generators seeded anew."""
    parallel = config.parallel
    return {
        "parallel.tensor": parallel.tensor,
        "parallel.pipeline": parallel.pipeline,
        "parallel.virtual_pipeline": parallel.virtual_pipeline,
        "parallel.context": parallel.context,
        "number of processes": world_size,
    }


def reshards(config: Config) -> bool:
    """Whether a checkpoint can be read under another layout: Megatron's distributed optimizer knows Adam's states only
    apart from its own buffers."""
    return config.optim.name is OptimizerName.adam or not config.parallel.distributed_optimizer


def plain(group: Any) -> dict[str, Any]:
    """A dataclass as JSON would give it back, so that read and current values compare."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(group), default=lambda value: value.value))
    return plain


def sharded_state(
    chunks: Sequence[torch.nn.Module], optimizer: Any, loading: bool, with_generators: bool = True
) -> dict[str, Any]:
    """Megatron's description of this rank's weights, optimizer state and random generators. Collective.

    with_generators: False where the checkpoint's are those of another layout.
    """
    is_adam = optimizer.config.optimizer == OptimizerName.adam.value
    metadata = {
        # tensors of the parameters' own shapes; dp_reshardable has the distributed optimizer's buffers
        "distrib_optim_sharding_type": "fully_reshardable" if is_adam else "dp_reshardable",
        # gathered on one rank of each data-parallel group, in host memory
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if loading:
        _allocate_adam_state(optimizer)
    models: list[Any] = unwrap_model(list(chunks))
    state: dict[str, Any] = {
        _model_key(models, index): model.sharded_state_dict(metadata=metadata) for index, model in enumerate(models)
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    if with_generators:
        state["generators"] = ShardedObject(
            "generators", generators(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
        )
    return state


def restore(loaded: Mapping[str, Any], chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Put a loaded state in place. Rates, decay and betas stay those of the configuration."""
    models: list[Any] = unwrap_model(list(chunks))
    for index, model in enumerate(models):
        model.load_state_dict(loaded[_model_key(models, index)])
    # before loading, for 0.19 finds the groups again by their rates
    for group, settings in zip(_groups(loaded["optimizer"]), settings_of(optimizer), strict=True):
        group.update(settings)
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    _own_steps(optimizer)
    if "generators" in loaded:
        set_generators(loaded["generators"])


def _groups(optimizer_state: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups in an optimizer's state, however deep its wrappers put them."""
    if isinstance(optimizer_state, Mapping):
        for key, value in optimizer_state.items():
            yield from value if key == "param_groups" else _groups(value)


def _torch_adams(optimizer: Any) -> Iterator[torch.optim.Adam]:
    """Torch's own Adam, which Megatron falls back on without Transformer Engine and Apex, inside its wrappers."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield part.optimizer


def _allocate_adam_state(optimizer: Any) -> None:
    """Zeros to load into: DistributedOptimizer.state_dict asserts that there is a step."""
    for adam in _torch_adams(optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _own_steps(optimizer: Any) -> None:
    """Each parameter's step in a tensor of its own. DistributedOptimizer loads the step into the groups alone, and
    shares one tensor among the states, which every parameter would advance."""
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            loaded = group.pop("step", None)
            for parameter in group["params"]:
                own = adam.state[parameter]
                own["step"] = own["step"].clone() if loaded is None else torch.tensor(float(loaded))


def _model_key(models: Sequence[Any], index: int) -> str:
    """Megatron's optimizer looks for these names."""
    return "model" if len(models) == 1 else f"model{index}"


def generators() -> dict[str, Any]:
    """The state of every random generator of this rank."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Put back what generators() gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
