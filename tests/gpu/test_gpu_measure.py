"""On a GPU: each number that a run tells of itself against one found another way."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from memory.engine.cuda_host import CudaHostTier
from memory.engine.engine import MemoryEngine
from memory.engine.ledger import Ledger
from memory.engine.pinned import PinnedPool
from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import LayerPlan, Plan, keep_plan
from models.config import ModelConfig
from tests.gpu.harness import MODEL, _batch
from trainer.config.schema import (
    BaselineConfig,
    BaselineMode,
    Config,
    DataConfig,
    DataSource,
    LoggerConfig,
    OptimConfig,
    OptimizerName,
    TrainerConfig,
    WandbMode,
)
from trainer.report.launch import Launch
from trainer.report.reporter import Reporter
from trainer.run.link import measure_link
from trainer.run.session import train

GIB = 1 << 30
OFF = BaselineConfig(BaselineMode.off)
SELECTIVE = RecomputeOptions(Granularity.selective)
FULL = RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=1)
FINE = OffloadOptions(OffloadKind.fine_grained)
#: Llama-3-8B's width, long enough for its copies to hide
WIDE = ModelConfig(
    num_layers=4,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    seq_length=8192,
    vocab_size=32000,
)


@pytest.fixture(scope="module", autouse=True)
def parallel_groups() -> None:
    """Each run makes its own."""


@contextlib.contextmanager
def groups() -> Iterator[None]:
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def a_config(**changes: Any) -> Config:
    """Forward and backward of 16,384 tokens a step."""
    trainer = {"steps": 40, "micro_batch_size": 2, "eval_batches": 0, "log_every": 10} | changes.pop("trainer", {})
    fields: dict[str, Any] = {
        "model": WIDE,
        "data": DataConfig(source=DataSource.mock, vocab_size=WIDE.vocab_size),
        "optim": OptimConfig(name=OptimizerName.none),
        "trainer": TrainerConfig(**trainer),
        "logger": LoggerConfig(wandb_mode=WandbMode.disabled),
        "baseline": OFF,
    }
    return Config(**(fields | changes))


def result_of(config: Config, folder: Path) -> dict[str, Any]:
    with Reporter(config, folder, "", launch=Launch()) as reporter:
        train(config, folder, "", reporter)
    gc.collect()
    torch.cuda.empty_cache()
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded


def intervals_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "categories" in row]


_ACT = frozenset({"attn_norm_out", "mlp_norm_out", "act_out"})
PLANS = {
    "keep": keep_plan(MODEL.num_layers),
    "norms_act": Plan(layers=(LayerPlan(recompute=_ACT),) * MODEL.num_layers),
    "fc1_offloaded": Plan(
        layers=(LayerPlan(recompute=_ACT, offload=frozenset({"fc1_out", "mlp_residual"})),) * MODEL.num_layers
    ),
    "mlp_region": Plan(layers=(LayerPlan(regions=frozenset({"mlp"})),) * MODEL.num_layers),
    "whole": Plan(layers=(LayerPlan(),) * MODEL.num_layers, spans=tuple((n, n + 1) for n in range(MODEL.num_layers))),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_stash_is_what_the_allocator_gave_out(name: str) -> None:
    """At the end of forward, within 1%."""
    from megatron.core import tensor_parallel

    from models.builder import build_gpt, transformer_config

    with groups():
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        assert MODEL.vocab_size
        (chunk,) = build_gpt(MODEL, transformer_config(MODEL, bf16=True), vocab_size=MODEL.vocab_size)
        chunk.bfloat16()
        engine = MemoryEngine(PLANS[name], host_limit_bytes=8 * GIB)
        engine.attach([chunk])
        for _ in range(2):  # workspaces and tables that the first step makes stay
            chunk.zero_grad()
            batch = _batch(1, MODEL.seq_length)
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            engine.begin_step()
            loss = chunk(**batch).float().mean()
            given, held = torch.cuda.memory_allocated() - before, engine.held_bytes
            loss.backward()
        assert engine.held_bytes == 0
    print(f"{name}: held {held}, given out {given}, {held / given - 1:+.3%}")
    assert held == pytest.approx(given, rel=0.01)


def test_backward_delta_agrees_with_two_runs(tmp_path: Path) -> None:
    """Within 2 points, as do forward and step; so does the peak that was saved."""
    plan = {"recompute": SELECTIVE, "offload": replace(FINE, fraction=0.5)}
    kept = result_of(a_config(), tmp_path / "kept")
    alone = result_of(a_config(**plan), tmp_path / "alone")
    within = result_of(a_config(**plan, baseline=BaselineConfig()), tmp_path / "within")
    assert within["baseline"]["source"] == "measured"
    assert within["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    for part in ("backward", "forward", "step"):
        by_two = alone[f"{part}_s"] / kept[f"{part}_s"] - 1
        print(f"{part}: in the run {within['delta'][part]:+.2%}, by two runs {by_two:+.2%}")
        assert within["delta"][part] == pytest.approx(by_two, abs=0.02)
    by_two = alone["peak_allocated_bytes"] / kept["peak_allocated_bytes"] - 1
    assert within["delta"]["peak_allocated"] == pytest.approx(by_two, abs=0.02)
    assert (tmp_path / "within" / "report.md").is_file()


def test_a_probe_comes_near_the_measured_baseline(tmp_path: Path) -> None:
    measured, probed = (
        result_of(a_config(recompute=FULL, baseline=BaselineConfig(mode)), tmp_path / mode.value)
        for mode in (BaselineMode.auto, BaselineMode.probe)
    )
    assert probed["baseline"]["source"] == "estimated"
    for part in ("backward", "step", "peak_allocated"):
        print(f"{part}: measured {measured['delta'][part]:+.2%}, estimated {probed['delta'][part]:+.2%}")
    assert probed["delta"]["step"] == pytest.approx(measured["delta"]["step"], abs=0.05)
    assert probed["delta"]["peak_saved"] == pytest.approx(measured["delta"]["peak_saved"], abs=0.05)


def test_mfu_and_hfu_by_hand(tmp_path: Path) -> None:
    run = result_of(a_config(recompute=FULL, trainer={"steps": 8}), tmp_path)
    matrices = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    scores = 4 * 4096 * 8192  # QK^T and its product with V over the causal half, for each weight-like multiply-add
    flops = 16384 * 6 * (matrices + scores + 4096 * 32000)
    mfu = flops / run["step_s"] / run["hardware"]["peak_flops_per_s"]
    assert run["mfu"] == pytest.approx(mfu, rel=1e-9)
    again = (matrices + scores) / 3 / (matrices + scores + 4096 * 32000)
    last = intervals_of(tmp_path)[-1]
    assert last["recomputed_flops"] == pytest.approx(again, rel=1e-9)


def test_copy_rate_is_bytes_over_the_clock() -> None:
    """Copies alone, by events and by the wall clock, within 5%; and near what was measured at the start."""
    device = torch.device("cuda")
    tier = CudaHostTier(PinnedPool(8 * GIB), window_layers=1.0, ledger=Ledger())
    tensors = [torch.ones(256 << 20, dtype=torch.uint8, device=device) for _ in range(16)]
    for _ in range(2):  # the first round takes host memory
        torch.cuda.synchronize()
        tier.meter.begin_step(on=True)
        began = time.perf_counter()
        tickets = [tier.offload(tensor) for tensor in tensors]
        torch.cuda.synchronize()
        out_s = time.perf_counter() - began
        use = tier.meter.read()
        for ticket in tickets:
            ticket.release()
    link = measure_link(device)
    by_events, by_clock = use.out_bytes / use.out_s, use.out_bytes / out_s
    print(f"out: {by_events / 1e9:.1f} GB/s by events, {by_clock / 1e9:.1f} by the clock, link {link}")
    assert use.out_bytes == 16 * (256 << 20)
    assert by_events == pytest.approx(by_clock, rel=0.05)
    assert by_events == pytest.approx(link.out_bytes_per_s, rel=0.05)


def test_copies_of_a_run_add_up(tmp_path: Path) -> None:
    run = result_of(a_config(offload=replace(FINE, fraction=0.5)), tmp_path)
    last = intervals_of(tmp_path)[-1]
    print({key: value for key, value in last.items() if "copy" in key or "counted" in key or key == "stall_s"})
    assert sum(actions.get("offload", 0) for actions in last["sites"].values()) == run["offloaded_bytes"]
    for way in ("out", "back"):
        # both ways share the link, and neither beats it
        assert 0.6 < last[f"copy_{way}_link_share"] < 1.05
        if last[f"counted_{way}_bytes"]:
            assert last[f"counted_{way}_bytes"] > 0.9 * run["offloaded_bytes"]


def test_the_parts_of_the_peak_are_the_peak(tmp_path: Path) -> None:
    run = result_of(
        a_config(optim=OptimConfig(), recompute=SELECTIVE, trainer={"steps": 12}, model=replace(WIDE, num_layers=2)),
        tmp_path,
    )
    last = intervals_of(tmp_path)[-1]
    print({name: f"{nbytes / GIB:.2f}" for name, nbytes in last["categories"].items()})
    allocated = sum(nbytes for name, nbytes in last["categories"].items() if name != "fragmentation")
    assert allocated == pytest.approx(run["peak_allocated_bytes"], rel=0.01)
    parameters = run["parameters"]
    assert last["categories"]["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert last["categories"]["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    # fp32 weights and two moments
    assert last["categories"]["optimizer"] == pytest.approx(12 * parameters, rel=0.01)
    _, total = torch.cuda.mem_get_info()
    assert last["peak_device_share"] == pytest.approx(last["peak_allocated_bytes_max"] / total)


@pytest.mark.parametrize(
    ("bad", "threshold", "remedy"),
    [
        ({"recompute": FULL}, "mfu_drop", "recompute=selective"),
        ({"recompute": replace(SELECTIVE, modules=["mlp_act", "core_attn"])}, "module_saves", "[mlp_act]"),
        (
            {"offload": FINE, "model": replace(WIDE, seq_length=1024), "trainer": {"micro_batch_size": 4}},
            "link",
            "offload.fraction=",
        ),
    ],
    ids=["full", "core_attn", "too_much_offload"],
)
def test_a_bad_configuration_gets_the_right_advice(
    bad: dict[str, Any], threshold: str, remedy: str, tmp_path: Path
) -> None:
    run = result_of(a_config(baseline=BaselineConfig(), **bad), tmp_path)
    print(*(f"{one['threshold']}: {one['problem']}: {one['remedy']}" for one in run["advice"]), sep="\n")
    remedies = {one["threshold"]: one["remedy"] for one in run["advice"]}
    assert remedy in remedies[threshold]


def test_a_full_device_is_told_to_offload(tmp_path: Path) -> None:
    _, total = torch.cuda.mem_get_info()
    ballast = torch.empty(int(total * 0.84), dtype=torch.uint8, device="cuda")
    config = a_config(baseline=BaselineConfig())
    run = result_of(config, tmp_path)
    del ballast
    remedies = {one["threshold"]: one["remedy"] for one in run["advice"]}
    print(run["advice"])
    assert remedies["peak"] == "offload=fine_grained"


def test_looking_closer_waits_for_nothing() -> None:
    """A metered forward and backward synchronises nowhere."""
    from megatron.core import tensor_parallel

    from models.builder import build_gpt, transformer_config

    with groups():
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        assert MODEL.vocab_size
        (chunk,) = build_gpt(MODEL, transformer_config(MODEL, bf16=True), vocab_size=MODEL.vocab_size)
        chunk.bfloat16()
        engine = MemoryEngine(PLANS["fc1_offloaded"], host_limit_bytes=8 * GIB)
        engine.attach([chunk])
        for metered in (False, True):
            batch = _batch(1, MODEL.seq_length)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if metered else "default")
            try:
                engine.begin_step(metered)
                chunk(**batch).float().mean().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        use = engine.link_use()
        assert use.out_bytes == use.back_bytes == engine.end_step().offloaded_bytes > 0
