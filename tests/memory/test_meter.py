from __future__ import annotations

import time

import pytest
import torch

from memory.engine import meter
from memory.engine.engine import MemoryEngine
from memory.engine.meter import LinkMeter, LinkUse
from memory.plan import LayerPlan, Plan
from tests.memory.conftest import MODEL, run_plan


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second after the one before."""
    answers = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(answers)))


def test_spans_are_summed_by_kind_until_read(seconds: None) -> None:
    link = LinkMeter(cuda=False)
    link.begin_step(on=True)
    for kind, nbytes in (("out", 10), ("back", 7), ("out", 20)):
        with link.span(kind, nbytes):  # type: ignore[arg-type]
            pass
    # synchronous copies: compute stands still for all of them
    assert link.read() == LinkUse(30, 2.0, 7, 1.0, 3.0)
    assert link.read() == LinkUse(0, 0.0, 0, 0.0, 0.0)


def test_nothing_is_timed_unless_asked_and_no_more_than_so_many(seconds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    link = LinkMeter(cuda=False)
    monkeypatch.setattr(meter, "_MOST_SPANS", 2)
    for on in (False, True):
        link.begin_step(on)
        for _ in range(3):
            with link.span("out", 1):
                pass
        assert link.read().out_bytes == (2 if on else 0)


def test_every_offloaded_byte_goes_out_and_comes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(layers=(LayerPlan(offload=frozenset({"fc1_out", "layer_input"})),) * MODEL.num_layers)

    begin_step = MemoryEngine.begin_step
    monkeypatch.setattr(MemoryEngine, "begin_step", lambda engine: begin_step(engine, metered=True))
    run = run_plan(MODEL, plan)
    use, offloaded = run.engine.link_use(), sum(step.offloaded_bytes for step in run.steps)
    assert use.out_bytes == use.back_bytes == offloaded > 0
    assert use.out_s > 0 and use.back_s > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_device_is_timed_and_never_waited_for() -> None:
    link = LinkMeter(cuda=True)
    link.begin_step(on=True)
    began = time.perf_counter()
    with link.span("out", 5):
        torch.cuda._sleep(200_000_000)
    launched_s = time.perf_counter() - began
    use = link.read()
    assert use.out_bytes == 5 and use.out_s > 0.05 > launched_s
