"""What a run tells its observer about itself before the first step."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from memory.plan import Plan
from models.flops import flops_per_token
from models.parameters import parameter_count
from trainer.config.schema import Config
from trainer.report.baseline import Choice
from trainer.report.machine import host_facts
from trainer.report.observer import RunInfo
from trainer.run.distributed import World
from trainer.run.loop import Start
from trainer.run.state import plain
from trainer.shape import uses_bf16

#: versions without which a result cannot be repeated
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "hydra-core")
#: of the model, parallel and optim groups: what a step's time does not depend on
_NO_SPEED = frozenset(
    {"model.name", "model.init_method_std", "parallel.timeout_s"}
    | {f"optim.{key}" for key in ("lr", "min_lr", "weight_decay", "beta1", "beta2", "eps", "sgd_momentum")}
    | {"optim.warmup_steps", "optim.decay_style"}
)


def run_info(
    config: Config,
    output_dir: Path,
    here: World,
    vocab_size: int,
    tokens_per_step: int,
    start: Start,
    plan: Plan | None,
    baseline: Choice,
    fingerprint: Mapping[str, Any],
) -> RunInfo:
    padded_vocab = config.model.padded_vocab_size(vocab_size, config.parallel.tensor)
    return RunInfo(
        config=config,
        output_dir=output_dir,
        parameters=parameter_count(config.model, padded_vocab),
        flops_per_token=flops_per_token(config.model, padded_vocab, config.model.seq_length).total,
        tokens_per_step=tokens_per_step,
        world_size=here.size,
        device_name=device_name(here.device),
        versions=_versions(),
        hardware=host_facts(),
        first_step=start.step + 1,
        earlier_losses=start.losses,
        plan=plan,
        baseline=baseline,
        fingerprint=fingerprint,
    )


def measured_fingerprint(config: Config, here: World, vocab_size: int, global_batch: int) -> dict[str, Any]:
    """What two runs must share for their times and peaks to be comparable, but for what is done with memory."""
    groups = {"model": config.model, "parallel": config.parallel, "optim": config.optim}
    values = {f"{group}.{key}": value for group, node in groups.items() for key, value in plain(node).items()}
    speed = {key: value for key, value in values.items() if key not in _NO_SPEED}
    return {
        **speed,
        "model.vocab_size": vocab_size,
        "trainer.micro_batch_size": config.trainer.micro_batch_size,
        "trainer.global_batch_size": global_batch,
        "trainer.precision": "bf16" if uses_bf16(config.trainer.precision, here.on_gpu) else "fp32",
        "trainer.deterministic": config.trainer.deterministic,
        "device": device_name(here.device),
        "number of processes": here.size,
        **{f"version of {name}": version for name, version in _versions().items()},
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's as Linux tells it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
