"""Rules of the training loop, the optimizer, the logger and resuming. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules.common import at_least, divides, positive, share, unused
from trainer.config.rules.parallel import data_parallel_size
from trainer.config.schema import Config, OptimizerName
from trainer.report.sweep import job_folders


def size_problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from at_least(
        config,
        1,
        "trainer.steps",
        "trainer.micro_batch_size",
        "trainer.global_batch_size",
        "trainer.checkpoint_keep",
        "trainer.schedule_steps",
        "trainer.log_every",
        # Megatron refuses a seed of 0
        "trainer.seed",
    )
    yield from at_least(
        config,
        0,
        "trainer.eval_every",
        "trainer.eval_batches",
        "trainer.checkpoint_every",
        "optim.min_lr",
        "optim.weight_decay",
        "optim.clip_grad",
        "optim.warmup_steps",
    )
    yield from positive(
        config, "optim.lr", "optim.eps", "hardware.peak_bf16_tflops", "hardware.memory_gib", "hardware.link_gbps"
    )
    yield from share(config, "optim.beta1", "optim.beta2", "optim.sgd_momentum")


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from _batch(config, machine)
    yield from _schedule(config)
    yield from _resume(config)
    yield from _report(config)
    if config.optim.name is OptimizerName.none:
        yield from _no_optimizer(config)
    if config.hardware.match is not None:
        try:
            re.compile(config.hardware.match)
        except re.error as error:
            yield ConfigError(
                "hardware.match", f"not a regular expression: {error}", "Write the device's name or a part of it"
            )
    url = config.logger.base_url
    if url is not None and not re.match(r"https?://\S", url):
        yield ConfigError("logger.base_url", f"{url} is no address", "Write it with https://")


def _batch(config: Config, machine: Machine) -> Iterator[ConfigError]:
    trainer, parallel = config.trainer, config.parallel
    if trainer.eval_every and not trainer.eval_batches:
        yield ConfigError(
            "trainer.eval_every",
            "would do nothing: trainer.eval_batches is 0",
            "Write trainer.eval_batches=8 or drop it",
        )
    ranks = data_parallel_size(config, machine)
    a_round = trainer.micro_batch_size * ranks
    batch = trainer.global_batch_size or a_round
    yield from divides(
        "trainer.global_batch_size",
        batch,
        "trainer.micro_batch_size x data-parallel ranks",
        a_round,
        "every rank does as many micro-batches",
    )
    micro_batches = batch // a_round
    if parallel.virtual_pipeline is not None and parallel.pipeline > 1 and micro_batches % parallel.pipeline:
        least = a_round * parallel.pipeline
        yield ConfigError(
            "trainer.global_batch_size",
            f"gives {micro_batches} micro-batches a rank, no multiple of parallel.pipeline={parallel.pipeline}, "
            "as the interleaved schedule needs",
            f"Write trainer.global_batch_size={least} or a multiple",
        )


def _schedule(config: Config) -> Iterator[ConfigError]:
    optim, trainer = config.optim, config.trainer
    if optim.min_lr > optim.lr:
        yield ConfigError("optim.min_lr", f"{optim.min_lr} is above optim.lr={optim.lr}", "Write a smaller one")
    length = trainer.schedule_steps or trainer.steps
    if optim.warmup_steps is not None and optim.warmup_steps >= length:
        name = "trainer.steps" if trainer.schedule_steps is None else "trainer.schedule_steps"
        yield ConfigError(
            "optim.warmup_steps",
            f"{optim.warmup_steps} is not below {name}={length}, the length of the schedule",
            f"Write at most {length - 1}, or a larger {name}",
        )


def _no_optimizer(config: Config) -> Iterator[ConfigError]:
    yield from unused(
        config,
        "with optim=none weights stay as they are",
        "Drop it or choose an optimizer",
        "resume",
        *(["trainer.checkpoint_every"] if config.trainer.checkpoint_every else []),
        "parallel.distributed_optimizer",
        "parallel.overlap_grad_reduce",
        "parallel.overlap_param_gather",
    )


def _resume(config: Config) -> Iterator[ConfigError]:
    if config.resume is None:
        return
    folder = Path(config.resume)
    if not folder.is_dir():
        yield ConfigError(
            "resume", f"there is no folder {folder}", "Give the folder of an earlier run, outputs/DATE/TIME"
        )
    elif not any(re.fullmatch(r"step_\d{8,}", path.name) for path in folder.glob("checkpoints/*")):
        yield ConfigError(
            "resume",
            f"{folder} holds no finished checkpoint",
            "Give the folder of a run that wrote one (trainer.checkpoint_every), without /checkpoints",
        )


def _report(config: Config) -> Iterator[ConfigError]:
    if config.report is None:
        return
    folder = Path(config.report)
    if not folder.is_dir():
        yield ConfigError("report", f"there is no folder {folder}", "Give the folder of a sweep, multirun/DATE/TIME")
    elif not job_folders(folder):
        yield ConfigError("report", f"{folder} holds no jobs of a sweep", "Give the folder above those of the jobs")
