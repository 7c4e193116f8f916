"""Model, optimizer and stepper of one run, wired as Megatron wires them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from models.builder import build_gpt, transformer_config
from models.config import Layout
from trainer.config.registered import model_builder
from trainer.config.schema import Config, Engine, OptimizerName
from trainer.run.clock import StepClock
from trainer.run.data.batches import Batches
from trainer.run.distributed import World
from trainer.run.memory import RunMemory, megatron_switches
from trainer.run.optimizer import build_optimizer, build_scheduler
from trainer.run.recover import agreed, agrees
from trainer.run.step import Stepper
from trainer.run.update import DropGradients, MegatronUpdate, Update
from trainer.shape import uses_bf16


@dataclass(frozen=True)
class Built:
    """Everything that training changes, and what changes it."""

    #: wrapped for training
    chunks: Sequence[torch.nn.Module]
    #: None: optim=none
    optimizer: Any
    scheduler: Any
    stepper: Stepper
    memory: RunMemory


def build(config: Config, here: World, batches: Batches, vocab_size: int) -> Built:
    """This rank's part of a fresh run. Collective."""
    bf16 = uses_bf16(config.trainer.precision, here.on_gpu)
    parallel = config.parallel
    stock = config.engine.name is Engine.megatron
    megatron_config: Any = transformer_config(
        config.model,
        Layout(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            context=parallel.context,
            expert=parallel.expert,
            sequence_parallel=parallel.sequence_parallel,
            overlap_p2p_comm=parallel.overlap_p2p_comm,
        ),
        bf16=bf16,
        deterministic=config.trainer.deterministic,
        switches=megatron_switches(config),
    )
    builder = model_builder(config)
    if builder:
        bare = builder(config.model, megatron_config, vocab_size)
    else:
        bare = build_gpt(config.model, megatron_config, vocab_size=vocab_size, stock_spec=stock)
    clock = StepClock(here.device)
    megatron_config.timers = clock
    chunks = [Float16Module(megatron_config, chunk) if bf16 else chunk for chunk in bare]
    optimizer = scheduler = None
    update: Update = DropGradients(chunks)
    if config.optim.name is not OptimizerName.none:
        chunks = [_reduced(chunk, megatron_config, config, first=not index) for index, chunk in enumerate(chunks)]
        optimizer = build_optimizer(config, chunks, bf16)
        scheduler = build_scheduler(config, optimizer, batches.shape.global_batch)
        update = MegatronUpdate(chunks, optimizer, scheduler, batches.shape.global_batch)
        megatron_config.finalize_model_grads_func = (
            agreed(finalize_model_grads) if agrees(config) else finalize_model_grads
        )
        megatron_config.grad_scale_func = optimizer.scale_loss
    if parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        megatron_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    memory = RunMemory(config, bare)
    stepper = Stepper(
        chunks=chunks,
        update=update,
        clock=clock,
        batches=batches,
        seq_length=config.model.seq_length,
        memory=memory,
        gathers_late=parallel.overlap_param_gather,
        device=here.device,
    )
    return Built(chunks, optimizer, scheduler, stepper, memory)


def _reduced(chunk: torch.nn.Module, megatron_config: Any, config: Config, first: bool) -> Any:
    """With its gradients in buffers that data-parallel ranks reduce."""
    parallel = config.parallel
    return DistributedDataParallel(
        config=megatron_config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=parallel.grad_reduce_in_fp32,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            use_distributed_optimizer=parallel.distributed_optimizer,
        ),
        module=chunk,
        # Megatron buckets the first chunk alone: the others' gradients are ready while backward still runs
        disable_bucketing=not first,
    )
