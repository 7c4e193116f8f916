"""The steps of a run under plan=auto: measured at first, and saved from running out of memory."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.calibration import Calibration, load_calibration
from trainer.config.schema import Config, PlanSource
from trainer.estimate import auto_ladder
from trainer.pipeline import known_hardware
from trainer.run.build import Built
from trainer.run.calibrate import Calibrating, measured
from trainer.run.recover import Recovery, agrees
from trainer.run.step import Steps


def planned_steps(config: Config, built: Built, device: torch.device, folder: Path) -> Steps:
    """The stepper itself, unless the configuration asks for plan=auto."""
    if config.plan.source is not PlanSource.auto:
        return built.stepper
    has_cuda = device.type == "cuda"
    steps = Recovery(
        built.stepper,
        built.memory,
        lambda plan, calibration: auto_ladder(config, has_cuda, plan, calibration),
        agrees=agrees(config),
        folder=folder,
    )
    known = load_calibration(config, known_hardware(config.hardware, has_cuda))
    if not config.plan.calibrate_steps or known != Calibration():
        return steps
    return Calibrating(steps, built.memory, config, known, lambda: measured(built.chunks, config, device))
