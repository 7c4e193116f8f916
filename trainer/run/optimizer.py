"""Megatron's optimizer and learning-rate schedule from the optim group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.config.schema import Config


def build_optimizer(config: Config, chunks: Sequence[torch.nn.Module], bf16: bool) -> Any:
    """Megatron's optimizer over DDP-wrapped model chunks (megatron.core.optimizer.MegatronOptimizer).

    Norm weights and biases are not decayed (Megatron's standard overrides).
    """
    optim, parallel = config.optim, config.parallel
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=optim.name.value,
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            sgd_momentum=optim.sgd_momentum,
            clip_grad=optim.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=parallel.distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        list(chunks),
    )


def build_scheduler(config: Config, optimizer: Any, global_batch: int) -> OptimizerParamScheduler:
    """The schedule of the learning rate, which Megatron counts in samples."""
    optim, steps = config.optim, config.trainer.schedule_steps or config.trainer.steps
    warmup_steps = steps // 5 if optim.warmup_steps is None else optim.warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=warmup_steps * global_batch,
        lr_decay_steps=steps * global_batch,
        lr_decay_style=optim.decay_style.value,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=steps * global_batch,
        wd_incr_style="constant",
    )


#: parts of a parameter group that are state, not setting
_GROUP_STATE = ("params", "step")


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Each parameter group's settings (rates, decay, betas): what the configuration says, not what training made."""
    return [
        {name: value for name, value in group.items() if name not in _GROUP_STATE} for group in optimizer.param_groups
    ]
