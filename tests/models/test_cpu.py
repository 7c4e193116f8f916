"""CUDA calls that mean the CPU, on machines without CUDA only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import cpu
from models.config import ModelConfig

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA only where there is none")


def test_never_installed_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is available"):
        cpu.install()


@on_cpu
def test_tensors_asked_for_on_cuda_are_on_the_cpu() -> None:
    made = [
        torch.zeros([], device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.empty(2, device=torch.cuda.current_device()),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda"),
        torch.ones(2).to(device="cuda", dtype=torch.float64),
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[5].dtype is torch.float64


@on_cpu
def test_type_names_are_those_that_optimizers_compare() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype is torch.int64


@on_cpu
def test_installing_twice_changes_nothing() -> None:
    mode = cpu._mode
    cpu.install()
    assert cpu._mode is mode


@on_cpu
def test_rng_tracker_forks_the_cpu_generator_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    draws = []
    for _ in range(2):
        model_parallel_cuda_manual_seed(11)
        before = torch.get_rng_state()
        with caplog.at_level(logging.WARNING), get_cuda_rng_tracker().fork():
            draws.append(torch.rand(4))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], torch.rand(4))
    assert not caplog.records


@on_cpu
def test_compiled_functions_run_eagerly() -> None:
    calls = []

    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    assert function(torch.zeros(1)).item() == 1
    assert calls == [False]


@on_cpu
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_megatrons_ddp_and_optimizer_take_a_step(
    distributed_optimizer: bool, build: Callable[..., Any], loss_of: Callable[..., torch.Tensor]
) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    gpt = build(ModelConfig(num_layers=1, hidden_size=64, seq_length=16))
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    ddp = DistributedDataParallel(gpt.config, settings, gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5, use_distributed_optimizer=distributed_optimizer),
        [ddp],
    )
    losses = []
    for _ in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(ddp)
        loss.backward()
        ddp.finish_grad_sync()
        norm = torch.cat([p.main_grad.flatten() for p in gpt.parameters()]).norm().item()
        stepped, clipped_from, _ = optimizer.step()
        assert stepped and clipped_from == pytest.approx(norm, rel=1e-5)
        losses.append(loss.item())
    assert losses[1] < losses[0]
