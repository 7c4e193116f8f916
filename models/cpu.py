"""Megatron on a machine without CUDA: makes its unconditional uses of the GPU mean the CPU.

Megatron allocates on `torch.cuda.current_device()`, seeds CUDA generators and tests tensors for CUDA types without
asking whether there is a GPU. `install()` redirects those calls for this process; gloo then serves all its parallelism.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

from models import compat

_CPU = torch.device("cpu")

#: of malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: the most that glibc takes as each
_MMAP_THRESHOLD_BYTES, _TRIM_THRESHOLD_BYTES = 32 << 20, (1 << 31) - 4096


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Sends tensors asked for on CUDA to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers and gradient clipping compare this name with 'torch.cuda.FloatTensor'.
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and any(map(_is_cuda, args[1:])):
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class _ProgramOrder:
    """The CPU's stream: work is done in the order it is written, so there is nothing to wait for."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _keep_freed_memory() -> None:
    """Let malloc use freed memory again instead of giving it back.

    By default glibc maps each tensor of a few MiB anew: page faults were a quarter of the default model's step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


_mode: _CudaMeansCpu | None = None


def install() -> None:
    """Let this process build and train Megatron models on the CPU; call it before building one. Repeatable.

    The CPU generator serves as both of Megatron's generators, so dropout repeats exactly under recomputation.
    Functions that Megatron compiles (torch.compile) run eagerly: that needs no C++ compiler and no time to compile.

    Raises RuntimeError where CUDA is available.
    """
    global _mode
    if torch.cuda.is_available():
        raise RuntimeError("models.cpu.install: CUDA is available, nothing to stand in for")
    if _mode is not None:
        return
    _keep_freed_memory()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: _ProgramOrder()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = _get_rng_state
    cuda.set_rng_state = _set_rng_state
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # Its tracker finds that the CPU generator moved inside a fork, which here is the point.
    compat.mute(random.__name__, "CPU RNG state changed within GPU RNG context")
    torch.compiler.set_stance("force_eager")
    _mode = _CudaMeansCpu()
    _mode.__enter__()
