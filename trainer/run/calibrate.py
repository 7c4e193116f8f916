"""plan=auto on the machine itself: what a few steps measure corrects the prediction, and the plan is sought anew.

A plan changes nothing about a step's result, so the run's losses are those of any other plan.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from memory.planner.pipeline import predict
from trainer.calibration import Calibration, store_calibration
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.estimate import auto_decision
from trainer.pipeline import known_hardware, make_setting
from trainer.run.memory import RunMemory
from trainer.run.recover import Recovery
from trainer.run.step import StepOutcome

log = logging.getLogger(__name__)

_GIB = 1 << 30
_LINK_BYTES = 256 << 20
#: corrections beyond these say that the prediction is of something else
_COMPUTE_RANGE = (0.05, 1000.0)


class Calibrating:
    """Steps of which the first few are measured. Has the place of a Stepper.

    Args:
        calibration: the corrections known so far, the same on all ranks.
        measure: of single pieces and the link, once before the first step.
    """

    def __init__(
        self,
        steps: Recovery,
        memory: RunMemory,
        config: Config,
        calibration: Calibration,
        measure: Callable[[], Calibration],
    ) -> None:
        self._steps, self._memory, self._config = steps, memory, config
        self._calibration, self._measure = calibration, measure
        self._outcomes: list[StepOutcome] = []
        self._measured = self._done = False

    def train(self, consumed: int, stop_requested: Callable[[], bool], metered: bool) -> StepOutcome:
        """As Stepper.train; after the last measured step the plan may be another."""
        if not self._measured:
            self._measured = True
            self._calibration = _agreed(self._measure())
        outcome = self._steps.train(consumed, stop_requested, metered)
        # Steps of the baseline run under another plan, and are followed by a switch to this one.
        if not self._done and (self._memory.plan_now == self._memory.plan or self._steps.stepped_down):
            self._outcomes.append(outcome)
            # After a step down the prediction is no longer of what runs.
            if self._steps.stepped_down:
                self._done = True
            elif len(self._outcomes) == self._config.plan.calibrate_steps:
                self._done = True
                self._seek_anew()
        return outcome

    def evaluate(self) -> float:
        return self._steps.evaluate()

    def parameters_gathered(self) -> contextlib.AbstractContextManager[None]:
        return self._steps.parameters_gathered()

    def _seek_anew(self) -> None:
        config, has_cuda = self._config, torch.cuda.is_available()
        # The first step compiles, tunes and allocates.
        settled = self._outcomes[1:] or self._outcomes
        seconds = min(outcome.times.forward_s + outcome.times.backward_s for outcome in settled)
        peaks = [outcome.memory.peak_allocated_bytes for outcome in settled]
        known = [peak for peak in peaks if peak is not None]
        self._calibration = _agreed(
            fitted(config, has_cuda, self._memory.plan_now, self._calibration, seconds, max(known) if known else None)
        )
        if dist.get_rank() == 0:
            store_calibration(config, known_hardware(config.hardware, has_cuda), self._calibration)
        self._steps.calibration = self._calibration
        try:
            found = auto_decision(config, has_cuda, self._calibration).prediction
        except ConfigError as error:
            log.warning("as measured, %s; going on with the plan there is", error.problem)
            return
        if found.plan == self._memory.plan_now:
            log.info("calibrated: compute x %.3f; the plan stays as it is", self._calibration.compute)
            return
        log.info(
            "calibrated: compute x %.3f, peak %+.2f GiB; new plan: peak %.2f GiB, step %.1f ms",
            self._calibration.compute,
            self._calibration.extra_bytes / _GIB,
            found.peak_bytes / _GIB,
            found.step_s * 1e3,
        )
        self._memory.switch(found.plan)


def fitted(
    config: Config, has_cuda: bool, plan: Any, before: Calibration, seconds: float, peak_bytes: int | None
) -> Calibration:
    """Corrections under which the prediction for this rank's stage is what was measured.

    seconds: forward and backward of one step, all micro-batches; peak_bytes: None where nothing counts it.
    """
    rank = parallel_state.get_pipeline_model_parallel_rank()
    fit = replace(before, extra_bytes=0)
    # Copies that compute waits for don't scale with it, so one division is not enough.
    for _ in range(4):
        setting = make_setting(config, has_cuda, fit)
        found = predict(setting.pipeline, plan).simulations[rank]
        predicted_s = found.micro_batch_s * setting.pipeline.stages[rank].micro_batches
        least, most = _COMPUTE_RANGE
        fit = replace(fit, compute=min(most, max(least, fit.compute * seconds / predicted_s)))
    return replace(fit, extra_bytes=0 if peak_bytes is None else peak_bytes - found.peak_bytes)


def measured(chunks: Sequence[Any], config: Config, device: torch.device) -> Calibration:
    """Seconds of a layer's cheap pieces, and the rate of the link with both directions busy. Collective."""
    parallel, model = config.parallel, config.model
    pieces: dict[str, float] = {}
    if not parallel.overlap_param_gather:  # whose hooks expect each module once, in the order of a forward pass
        layer = unwrap_model(list(chunks))[0].decoder.layers[0]
        share = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
        generator = torch.Generator(device).manual_seed(1)
        hidden = torch.randn(
            (model.seq_length // share, config.trainer.micro_batch_size, model.hidden_size),
            generator=generator,
            device=device,
        ).to(next(layer.parameters()).dtype)
        with torch.no_grad():
            fc1_out, bias = layer.mlp.linear_fc1(hidden)
            work: Mapping[str, Callable[[], Any]] = {
                "attn_norm": lambda: layer.input_layernorm(hidden),
                "mlp_norm": lambda: layer.pre_mlp_layernorm(hidden),
                "fc1": lambda: layer.mlp.linear_fc1(hidden),
                "act": lambda: layer.mlp.activation(fc1_out, bias),
            }
            pieces = {name: _seconds(run, device) for name, run in work.items()}
    return Calibration(link_gbps=_link_gbps(device), pieces=tuple(pieces.items()))


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median of a few runs after two that are not counted."""
    times: list[float] = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[2:])[2]


def _link_gbps(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    out, back = torch.cuda.Stream(), torch.cuda.Stream()
    here = [torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def both() -> None:
        for _ in range(4):
            with torch.cuda.stream(out):
                there[0].copy_(here[0], non_blocking=True)
            with torch.cuda.stream(back):
                here[1].copy_(there[1], non_blocking=True)

    return 4 * _LINK_BYTES / _seconds(both, device) / 1e9


def _agreed(calibration: Calibration) -> Calibration:
    """The slowest and fullest of all ranks, so that all seek the same plan. Collective."""
    if dist.get_world_size() == 1:
        return calibration
    found: list[Calibration] = [calibration] * dist.get_world_size()
    dist.all_gather_object(found, calibration)
    names = [name for name, _ in calibration.pieces]
    links = [one.link_gbps for one in found if one.link_gbps is not None]
    return Calibration(
        compute=max(one.compute for one in found),
        extra_bytes=max(one.extra_bytes for one in found),
        link_gbps=min(links) if links else None,
        pieces=tuple((name, max(dict(one.pieces)[name] for one in found)) for name in names),
    )
