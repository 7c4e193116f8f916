from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from trainer.run.clock import BACKWARD, FORWARD, OPTIMIZER, StepClock, StepTimes


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """perf_counter answers 0, 1, 3, 6, 10, ...: the spans between calls are 1, 2, 3, 4, ... seconds."""

    def triangle() -> Iterator[float]:
        now = 0
        for step in range(1, 100):
            yield float(now)
            now += step

    answers = triangle()
    monkeypatch.setattr(time, "perf_counter", lambda: next(answers))


def span(clock: StepClock, name: str) -> None:
    clock(name, log_level=2).start(barrier=False)
    clock(name).stop()


def test_spans_add_up_by_name_until_read(ticks: None) -> None:
    clock = StepClock(torch.device("cpu"))
    span(clock, FORWARD)
    span(clock, BACKWARD)
    span(clock, FORWARD)
    span(clock, OPTIMIZER)
    assert clock.read() == StepTimes(forward_s=1 + 5, backward_s=3, optimizer_s=7)
    assert clock.read() == StepTimes(0, 0, 0)


def test_names_of_no_interest_cost_no_time_reading(ticks: None) -> None:
    clock = StepClock(torch.device("cpu"))
    span(clock, "forward-recv")
    span(clock, FORWARD)
    assert clock.read() == StepTimes(1, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_device_is_timed_and_never_waited_for() -> None:
    clock = StepClock(torch.device("cuda"))
    clock(FORWARD).start()
    began = time.perf_counter()
    torch.cuda._sleep(200_000_000)
    clock(FORWARD).stop()
    launched_s = time.perf_counter() - began
    torch.cuda.synchronize()
    assert clock.read().forward_s > 0.05 > launched_s
