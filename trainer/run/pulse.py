"""A sign of life from every rank, so that the others learn which of them died or hangs instead of waiting for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

#: between two signs of life
BEAT_S = 2.0
#: without a sign: a rank that nothing else has gone wrong on (its process is stopped, its node is gone)
SILENCE_S = 25.0
#: the same, once a collective has failed here
SILENCE_AFTER_ERROR_S = 8.0

#: for what has to be written before the process ends
_LAST_WORDS_S = 10.0

_LOST, _DONE = "lost", b"done"
#: runs of this process; all ranks count the same
_RUNS = itertools.count()


@contextlib.contextmanager
def pulse(rank: int, size: int, last_words: Callable[[str], None]) -> Iterator[Pulse | None]:
    """While entered, this process ends if another rank is lost. None: it is alone, or nobody started it among others.

    Args:
        last_words: called with the reason before that, from a thread, while the main one may wait for ever.
    """
    if size == 1 or "MASTER_ADDR" not in os.environ:
        yield None
        return
    # a connection of its own: that of the process group may be waiting
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    watch = Pulse(PrefixStore(f"pulse of run {next(_RUNS)}", client), rank, size, last_words)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


class Pulse:
    """Beats in a thread. Rank 0 watches all ranks, the others rank 0, so that the store answers few."""

    def __init__(self, store: Store, rank: int, size: int, last_words: Callable[[str], None]) -> None:
        self._store, self._rank, self._last_words = store, rank, last_words
        now = time.monotonic()
        #: rank -> its last sign, and when that came
        self._seen: dict[int, tuple[bytes, float]] = {
            other: (b"", now) for other in (range(1, size) if rank == 0 else [0])
        }
        self._silence_s = SILENCE_S
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the process that kept the store may be gone
            self._store.set(_key(self._rank), _DONE.decode())

    def explain(self, error: Exception) -> None:
        """Tell the others of an error of ours; one that others have caused ends this process once it is known whose."""
        if not _is_echo(error):
            self._tell(f"rank {self._rank}: {type(error).__name__}: {error}")
            return
        self._silence_s = SILENCE_AFTER_ERROR_S
        self._thread.join(SILENCE_AFTER_ERROR_S + 3 * BEAT_S)

    def _run(self) -> None:
        count = 0
        while not self._over.wait(BEAT_S):
            count += 1
            try:
                self._store.set(_key(self._rank), str(count))
                lost = self._told() or self._find_lost()
            except RuntimeError:  # the process that kept the store is gone
                lost = self._silent()
            if lost:
                self._end(lost)

    def _told(self) -> str | None:
        return self._store.get(_LOST).decode() if self._store.check([_LOST]) else None

    def _find_lost(self) -> str | None:
        now = time.monotonic()
        for other in list(self._seen):
            sign = self._store.get(_key(other)) if self._store.check([_key(other)]) else b""
            if sign == _DONE or sign != self._seen[other][0]:
                self._seen[other] = (sign, now)
        lost = self._silent()
        if lost:
            self._tell(lost)
        return lost

    def _silent(self) -> str | None:
        now = time.monotonic()
        silent = {other: now - when for other, (_, when) in self._seen.items()}
        other, silence_s = max(silent.items(), key=lambda item: item[1], default=(0, 0.0))
        if silence_s < self._silence_s:
            return None
        return f"rank {other} died or hangs: no sign of life for {silence_s:.0f} s"

    def _tell(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_LOST, "", reason)  # the first one counts

    def _end(self, reason: str) -> None:
        if self._rank == 0 or reason.startswith("rank 0"):
            print(f"error: {reason}", file=sys.stderr, flush=True)
        deadline = threading.Timer(_LAST_WORDS_S, os._exit, [1])
        deadline.daemon = True
        deadline.start()
        try:
            self._last_words(reason)
        finally:
            os._exit(1)


def _key(rank: int) -> str:
    return f"pulse {rank}"


def _is_echo(error: Exception) -> bool:
    """Whether this is how a collective reports that others are gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
