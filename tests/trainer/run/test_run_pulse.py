"""Who is told to be lost, with ranks as threads of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from trainer.run import pulse
from trainer.run.pulse import Pulse

ECHO = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


class Rank(Pulse):
    """Remembers the reason for which it would have ended its process."""

    def __init__(self, store: HashStore, rank: int) -> None:
        super().__init__(store, rank, 3, lambda reason: None)
        self.reason: str | None = None

    def _end(self, reason: str) -> None:
        self.reason = reason
        self._over.set()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(pulse, "BEAT_S", 0.02)
    monkeypatch.setattr(pulse, "SILENCE_S", 2.0)
    monkeypatch.setattr(pulse, "SILENCE_AFTER_ERROR_S", 1.0)
    store = HashStore()
    ranks = [Rank(store, rank) for rank in range(3)]
    for rank in ranks:
        rank._silence_s = 2.0
    yield ranks
    for rank in ranks:
        if rank._thread.is_alive():
            rank.stop()


def until_told(ranks: list[Rank]) -> list[str | None]:
    patience_s = time.monotonic() + 30
    while any(rank.reason is None for rank in ranks) and time.monotonic() < patience_s:
        time.sleep(0.02)
    return [rank.reason for rank in ranks]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_silent_rank_ends_the_others(ranks: list[Rank], lost: int) -> None:
    others = [rank for number, rank in enumerate(ranks) if number != lost]
    for rank in others:
        rank.start()
    assert [str(reason)[:21] for reason in until_told(others)] == [f"rank {lost} died or hangs:"] * 2


def test_an_error_of_one_is_the_reason_of_all(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start()
    ranks[1].explain(MemoryError("too much"))
    ranks[1].stop()
    ranks[2].explain(ECHO)
    assert until_told([ranks[0], ranks[2]]) == ["rank 1: MemoryError: too much"] * 2


def test_a_rank_that_is_done_is_not_lost(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start()
    ranks[1].stop()
    time.sleep(3)
    assert [rank.reason for rank in ranks] == [None] * 3
