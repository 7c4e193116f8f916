"""A close look at a few steps for a person's tools: a timeline, the allocator's history, or NVTX ranges."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.config.schema import ProfileConfig, ProfileKind
from trainer.report.baseline import WARM_UP_STEPS

log = logging.getLogger(__name__)

#: of the allocator's events that a snapshot holds
_MOST_EVENTS = 1_000_000


class _Tool(Protocol):
    def start(self) -> None: ...

    def stop(self) -> Path | None:
        """Where it wrote to, if it did."""


class Profile:
    """Runs a tool over some steps of the run, the warmed-up ones under its plan where there are enough.

    Args:
        chunks: this rank's model chunks, whose layers and modules get ranges by name.
        lead_in: steps before the plan is switched on.
        steps: of this run.
    """

    def __init__(
        self, config: ProfileConfig, chunks: Sequence[Any], folder: Path, *, rank: int, lead_in: int, steps: int
    ) -> None:
        self._tool = _tool(config.kind, chunks, folder, rank)
        self._first = max(lead_in, min(lead_in + WARM_UP_STEPS, steps - config.steps))
        self._past = min(self._first + config.steps, steps)

    @contextlib.contextmanager
    def step(self, done: int) -> Iterator[None]:
        """Around the step that follows `done` steps of this run."""
        if self._tool and done == self._first:
            self._tool.start()
        yield
        if self._tool and done == self._past - 1:
            written = self._tool.stop()
            log.info("profile: %d steps%s", self._past - self._first, f" in {written}" if written else "")


def _tool(kind: ProfileKind, chunks: Sequence[Any], folder: Path, rank: int) -> _Tool | None:
    if kind is ProfileKind.trace:
        return _Trace(chunks, folder / f"trace-rank{rank}.json.gz")
    if kind is ProfileKind.memory:
        return _MemoryHistory(folder / f"memory-rank{rank}.pickle")
    return _Ranges(chunks) if kind is ProfileKind.nvtx else None


class _Trace:
    """torch.profiler in Chrome's format, for ui.perfetto.dev."""

    def __init__(self, chunks: Sequence[Any], path: Path) -> None:
        self._path = path
        self._names = ModuleNames(chunks, self._enter, self._leave)
        self._open: list[Any] = []

    def start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._names.attach()

    def stop(self) -> Path:
        self._names.detach()
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))
        return self._path

    def _enter(self, name: str) -> None:
        named = torch.profiler.record_function(name)
        named.__enter__()
        self._open.append(named)

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)


class _MemoryHistory:
    """Every allocation and release with its stack, for pytorch.org/memory_viz."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)

    def stop(self) -> Path:
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return self._path


class _Ranges:
    """NVTX ranges: layers and their modules in forward, every operation in backward. `nsys profile` records them."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._names = ModuleNames(chunks, torch.cuda.nvtx.range_push, lambda: torch.cuda.nvtx.range_pop())
        self._operations: Any = None

    def start(self) -> None:
        self._names.attach()
        self._operations = torch.autograd.profiler.emit_nvtx()
        self._operations.__enter__()

    def stop(self) -> None:
        self._operations.__exit__(None, None, None)
        self._names.detach()


class ModuleNames:
    """Calls enter(name) and leave() around the forward pass of each layer and of each module in it, by hooks."""

    def __init__(self, chunks: Sequence[Any], enter: Callable[[str], Any], leave: Callable[[], Any]) -> None:
        self._chunks, self._enter, self._leave = chunks, enter, leave
        self._hooks: list[Any] = []

    def attach(self) -> None:
        for chunk in self._chunks:
            for layer in chunk.decoder.layers:
                number = layer.layer_number - 1
                for path, module in layer.named_modules():
                    self._around(module, f"layer {number} {path}".rstrip())

    def detach(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _around(self, module: torch.nn.Module, name: str) -> None:
        self._hooks.append(module.register_forward_pre_hook(lambda module, args: _nothing(self._enter(name))))
        self._hooks.append(
            module.register_forward_hook(lambda module, args, output: _nothing(self._leave()), always_call=True)
        )


def _nothing(_: Any) -> None:
    """A hook that returned something would replace the module's input or output."""
