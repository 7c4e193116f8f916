"""How fast the run is against how fast the device could be. Imports torch only to measure a CPU."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainer.config.schema import HardwareConfig

log = logging.getLogger(__name__)

HARDWARE_DIR = Path(__file__).resolve().parents[2] / "conf" / "hardware"

DATA_SHEET = "data sheet"
MEASURED = "measured by matmul"


@dataclass(frozen=True)
class Peak:
    """What one device can do at best; flops_per_s is None when nobody knows."""

    flops_per_s: float | None
    #: DATA_SHEET, MEASURED or "unknown"
    source: str


UNKNOWN = Peak(None, "unknown")


@dataclass(frozen=True)
class Throughput:
    """Turns seconds and tokens into rates. Tokens are counted over all ranks; the peak is of one of them."""

    flops_per_token: float
    world_size: int
    peak: Peak

    def model_flops_per_s(self, tokens_per_s: float) -> float:
        """Over all ranks; recomputation isn't counted (Megatron: num_floating_point_operations over time)."""
        return tokens_per_s * self.flops_per_token

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOPs utilisation as a share of 1 (PaLM, appendix B); None without a peak."""
        if self.peak.flops_per_s is None:
            return None
        return self.model_flops_per_s(tokens_per_s) / (self.peak.flops_per_s * self.world_size)


def matmul_flops_per_s(side: int = 1024, at_least_s: float = 0.2) -> float:
    """fp32 FLOP/s of this process's CPU: the fastest of square matmuls repeated for `at_least_s` seconds.

    The fastest, since whatever else the machine does can only slow one down.
    """
    import torch

    # ones, not random numbers: the run's random state is not ours to move
    a, b, out = (torch.ones(side, side) for _ in range(3))
    times_s: list[float] = []
    with torch.no_grad():
        torch.mm(a, b, out=out)
        while sum(times_s) < at_least_s or len(times_s) < 3:
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            times_s.append(time.perf_counter() - start)
    return 2 * side**3 / min(times_s)


def find_peak(
    device_name: str,
    hardware: HardwareConfig,
    on_cpu: bool,
    *,
    hardware_dir: Path = HARDWARE_DIR,
    measure: Callable[[], float] = matmul_flops_per_s,
) -> Peak:
    """The configured peak, else that of the first file of conf/hardware whose `match` fits, else (CPU) a measurement.

    A configured peak counts only where `hardware.match`, if set, fits the device: a run on a laptop with
    hardware=h200 must not be held against an H200.
    """
    if hardware.peak_bf16_tflops is not None:
        if hardware.match is None or _fits(hardware.match, device_name):
            return Peak(hardware.peak_bf16_tflops * 1e12, DATA_SHEET)
        log.warning("hardware=%s does not fit this device, %s: its peak is not used", hardware.name, device_name)
    for path in sorted(hardware_dir.glob("*.yaml")):
        entry = yaml.safe_load(path.read_text()) or {}
        match, peak_tflops = entry.get("match"), entry.get("peak_bf16_tflops")
        if match and peak_tflops and _fits(match, device_name):
            return Peak(float(peak_tflops) * 1e12, DATA_SHEET)
    if on_cpu:
        return Peak(measure(), MEASURED)
    log.warning("no peak FLOP/s known for %s, so no MFU: set hardware.peak_bf16_tflops", device_name)
    return UNKNOWN


def _fits(match: str, device_name: str) -> bool:
    return re.search(match, device_name, re.IGNORECASE) is not None
