"""Process groups, seeds and their end: a run leaves the process as it found it, so that another may follow."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from memory.options import OffloadKind
from trainer.config.schema import Config, ParallelConfig, PlanSource
from trainer.run.data.batches import BatchShape

#: runs of this process; all ranks count the same
_RUNS = itertools.count()


@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int
    size: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@contextlib.contextmanager
def world(config: Config) -> Iterator[World]:
    """Join torchrun's processes, or be a world of one, with Megatron's parallel groups and seeded generators.

    NCCL on GPUs, gloo on CPUs. The rules have checked that the world divides by the parallel sizes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.parallel.tensor > 1 and not may_offload(config):
        # read when CUDA starts; Megatron's overlap of gradients with their reduction needs kernels in order of issue
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    if config.trainer.deterministic:
        # read when cuBLAS and Transformer Engine's attention are first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        torch.use_deterministic_algorithms(True)
    try:
        _join(device, size, config.parallel.timeout_s)
        _split(config.parallel)
        seed_generators(config.trainer.seed)
        yield World(dist.get_rank(), size, device)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def may_offload(config: Config) -> bool:
    """Whether copies may wait on streams of their own: one queue would hold kernels back behind them."""
    return config.offload.kind is not OffloadKind.none or config.plan.source is not PlanSource.options


def _join(device: torch.device, size: int, timeout_s: int) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun's store outlives the run, and with it the addresses at which this run's ranks meet
        store = PrefixStore(f"run {next(_RUNS)}", store)
    else:
        # one process meets nobody: no port, hence none that another run could hold
        store, rank = HashStore(), 0
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _split(parallel: ParallelConfig) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        # Megatron makes a timedelta of it, so parts of minutes are fine
        distributed_timeout_minutes=parallel.timeout_s / 60,
    )


def seed_generators(seed: int) -> None:
    """Megatron's own rule: pipeline stages differ, data-parallel ranks do not (initialize._set_random_seed)."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    # a tracker that an earlier run left holds that run's states
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def batch_shape(config: Config) -> BatchShape:
    """How this world cuts a global batch."""
    trainer = config.trainer
    data_size = parallel_state.get_data_parallel_world_size()
    at_once = trainer.micro_batch_size * data_size
    return BatchShape(
        micro_batch=trainer.micro_batch_size,
        micro_batches=(trainer.global_batch_size or at_once) // at_once,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=data_size,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        # the interleaved schedule takes a micro-batch for each stage at a time
        multiple=config.parallel.pipeline if config.parallel.virtual_pipeline else 1,
    )
