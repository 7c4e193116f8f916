"""What a run tells its observer about itself before the first step."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

import torch

from models.flops import flops_per_token
from models.parameters import parameter_count
from trainer.config.schema import Config
from trainer.report.machine import host_facts
from trainer.report.observer import RunInfo
from trainer.run.distributed import World
from trainer.run.loop import Start

#: versions without which a result cannot be repeated
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "hydra-core")


def run_info(
    config: Config, output_dir: Path, here: World, vocab_size: int, tokens_per_step: int, start: Start
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
        versions={"python": platform.python_version(), **_versions()},
        hardware=host_facts(),
        first_step=start.step + 1,
        earlier_losses=start.losses,
    )


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
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
