"""Checkpoints on disk: whole ones by name, oldest thinned out, written by Megatron's dist_checkpointing.

A checkpoint is written under a name that nothing reads, and gets its own by one rename when every byte is on the disk.
So a run killed at any moment leaves the earlier ones and perhaps rubbish, never half a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from models.compat import mute
from trainer.config.errors import ConfigError

_NAME = re.compile(r"step_(\d{8,})")
_DRAFT_PREFIX = ".writing-"
_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as plain data beside the tensors; readable without torch."""

    step: int
    consumed_samples: int
    #: what OptimizerParamScheduler counts
    scheduler_samples: int
    #: one a step, from the first
    losses: Sequence[float]
    #: what must be the same to go on from here: configuration key -> value
    fingerprint: Mapping[str, Any]
    #: how it was split over processes; generators are restored where that is the same
    layout: Mapping[str, Any]


def clean(folder: Path) -> None:
    """Remove what killed runs left half-written in a run's checkpoint folder."""
    if folder.is_dir():
        for path in folder.glob(f"{_DRAFT_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def newest(folder: Path) -> Path | None:
    """The whole checkpoint with the highest step in a run's checkpoint folder."""
    whole = _whole(folder)
    return whole[max(whole)] if whole else None


def _whole(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    return {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}


def read_progress(checkpoint: Path) -> Progress:
    return Progress(**json.loads((checkpoint / _PROGRESS_FILE).read_text()))


def refuse_if_different(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ConfigError naming each key in which a checkpoint's run and this one differ.

    A key that only one of them knows is of another version of this program and says nothing.
    """
    different = [key for key in sorted(saved.keys() & current.keys()) if saved[key] != current[key]]
    if different:
        told = ", ".join(f"{key} was {saved[key]!r} and is {current[key]!r}" for key in different)
        raise ConfigError("resume", f"the checkpoint is of another run: {told}", "Set these as they were")


def save(folder: Path, progress: Progress, resolved_yaml: str, sharded_state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint of the whole world and thin out older ones. Collective.

    Args:
        folder: the run's checkpoint folder, on a file system that all ranks share.
        sharded_state: Megatron's ShardedTensors and ShardedObjects.
        keep: how many checkpoints stay.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    final = folder / f"step_{progress.step:08d}"
    # 0.19 says so of every save, synchronous ones too
    mute("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated")
    first = dist.get_rank() == 0
    draft_name: list[Any] = [None]
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        # a fresh name: a writer process that outlived a killed run may still be filling the old one
        draft_name[0] = str(folder / f"{_DRAFT_PREFIX}{final.name}-{uuid.uuid4().hex}")
        os.mkdir(draft_name[0])
    dist.broadcast_object_list(draft_name, src=0)
    draft = Path(draft_name[0])
    with _no_helper_process():
        dist_checkpointing.save(
            sharded_state, str(draft), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        )
    if first:
        (draft / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)))
        (draft / "config_resolved.yaml").write_text(resolved_yaml)
        for path in draft.iterdir():
            _sync(path)
        _sync(draft)
        os.rename(draft, final)
        _sync(folder)
        whole = _whole(folder)
        for step in sorted(whole)[:-keep]:
            shutil.rmtree(whole[step])
    dist.barrier()
    return final


def load(checkpoint: Path, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Read what `sharded_state` asks for. Collective."""
    from megatron.core import dist_checkpointing

    loaded: dict[str, Any] = dist_checkpointing.load(sharded_state, str(checkpoint))
    return loaded


@contextlib.contextmanager
def _no_helper_process() -> Iterator[None]:
    """Within, Megatron's writer hands its results over in this process.

    It fetches them from a queue that may cross processes, and starts a manager process for it (a second of time, and
    the main module run again), although saving synchronously needs no such thing. 0.16 and 0.19 both keep it here.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
