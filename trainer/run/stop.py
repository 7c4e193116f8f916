"""Being asked to stop: SIGTERM and SIGINT let the step in hand finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

#: stands in for a signal's name when the guard wants the run to stop
GUARD = "guard"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, turns the first SIGTERM or SIGINT into a request; the second one acts as it did before."""

    def __init__(self) -> None:
        #: name of the signal that came, or GUARD; None: nothing did
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str:
        return "the guard" if self.signal == GUARD else "a signal"

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread set handlers; elsewhere, signals are the caller's matter
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
