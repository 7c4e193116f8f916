"""How fast copies between device and host are here, measured before the first step, and as the driver counts them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_BYTES = 128 << 20
_CPU_BYTES = 16 << 20
_TIMES = 5


@dataclass(frozen=True)
class Link:
    """Bytes a second of one large copy alone, out to host memory and back; without a GPU, of one within memory."""

    out_bytes_per_s: float
    back_bytes_per_s: float


def measure_link(device: torch.device) -> Link:
    if device.type == "cuda":
        return _measure_cuda_link(device)
    source, target = (torch.ones(_CPU_BYTES, dtype=torch.uint8) for _ in range(2))

    def copy_s() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    rate = _CPU_BYTES / min(copy_s() for _ in range(_TIMES))
    return Link(rate, rate)


def _measure_cuda_link(device: torch.device) -> Link:
    from memory.engine.pinned import PinnedPool

    pool = PinnedPool(_BYTES)
    pool.reserve(_BYTES)
    host = pool.take(_BYTES).memory
    on_device = torch.empty(_BYTES, dtype=torch.uint8, device=device)

    def rate(copy: Callable[[], Any]) -> float:
        make_event: Any = torch.cuda.Event
        seconds = []
        for _ in range(_TIMES):
            begin, end = make_event(enable_timing=True), make_event(enable_timing=True)
            begin.record()
            copy()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return _BYTES / min(seconds)

    link = Link(
        rate(lambda: host.copy_(on_device, non_blocking=True)), rate(lambda: on_device.copy_(host, non_blocking=True))
    )
    pool.close()
    return link


class LinkCounters:
    """Bytes that the driver saw cross the link (NVML's PCIe counters), all traffic of the device, not only our copies.

    Where NVML, the device or the container has no such counters, `read` gives None.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        if device.type == "cuda":
            # whatever NVML lacks here, the run does without
            with contextlib.suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        if self.read() is None:
            self._handle = None

    def read(self) -> tuple[int, int] | None:
        """(sent to the host, received from it) so far."""
        if self._handle is None:
            return None
        with contextlib.suppress(Exception):
            import pynvml

            fields = (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
            sent, received = pynvml.nvmlDeviceGetFieldValues(self._handle, fields)
            if sent.nvmlReturn == received.nvmlReturn == pynvml.NVML_SUCCESS:
                return int(sent.value.ullVal), int(received.value.ullVal)
        return None
