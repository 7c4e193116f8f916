"""What a run says of itself against numbers found another way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from models.config import Attention
from models.flops import flops_per_token
from tests.trainer.run.run_recorder import Recorder
from trainer.config.schema import BaselineConfig, BaselineMode, Config, Engine, EngineConfig, OptimizerName
from trainer.run.session import train

MakeConfig = Callable[..., Config]
OFF = BaselineConfig(BaselineMode.off)
SGD = {"name": OptimizerName.sgd, "warmup_steps": 0}


def selective(*modules: str) -> RecomputeOptions:
    return RecomputeOptions(Granularity.selective, modules=list(modules))


def full(method: Method, num_layers: int) -> RecomputeOptions:
    return RecomputeOptions(Granularity.full, method=method, num_layers=num_layers)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeOptions(),
        *(selective(name) for name in ("layernorm", "mlp_act", "mlp_fc1", "core_attn", "mlp")),
        selective("mlp_act", "mlp_fc1", "core_attn", "layernorm"),
        full(Method.uniform, 1),
        full(Method.uniform, 2),
        full(Method.block, 1),
    ],
    ids=lambda options: f"{options.granularity.value}-{options.modules or options.method}-{options.num_layers}",
)
def test_flops_of_every_recompute_option_are_those_that_torch_counts(
    make_config: MakeConfig, tmp_path: Path, recompute: RecomputeOptions
) -> None:
    model = {"attention": Attention.unfused, "attention_dropout": 0.0}
    config = make_config(steps=1, eval_batches=0, model=model, recompute=recompute, baseline=OFF, optim=SGD)
    watcher = Recorder()
    with FlopCounterMode(display=False) as counter:
        train(config, tmp_path, "", watcher)
    (interval,) = watcher.intervals
    again = interval.recomputed_flops_per_token
    flops = flops_per_token(config.model, 256, config.model.seq_length)
    # unfused attention computes the half of the scores that the causal mask drops, and Megatron's formula leaves out
    layers = config.model.num_layers
    dropped = flops.attention_core * (1 + (len(_layers_with_core_again(recompute, layers)) / layers) / 3)
    assert counter.get_total_flops() == pytest.approx(4 * 16 * (flops.total + sum(again.values()) + dropped), rel=1e-12)


def test_megatrons_own_recomputation_is_counted_alike(make_config: MakeConfig, tmp_path: Path) -> None:
    """Unnamed, its selective recomputation is of the attention core alone."""
    watcher = Recorder()
    model = {"attention": Attention.unfused, "attention_dropout": 0.0}
    selective_by_default = RecomputeOptions(Granularity.selective)
    engine = EngineConfig(Engine.megatron)
    config = make_config(steps=1, eval_batches=0, model=model, recompute=selective_by_default, engine=engine, optim=SGD)
    with FlopCounterMode(display=False) as counter:
        train(config, tmp_path, "", watcher)
    (interval,) = watcher.intervals
    flops = flops_per_token(config.model, 256, config.model.seq_length)
    assert interval.recomputed_flops_per_token == {"core_attn": flops.attention_core / 3}
    # once more for the half of the scores that the mask drops
    assert counter.get_total_flops() == pytest.approx(4 * 16 * (flops.total + flops.attention_core * (1 + 2 / 3)))


def _layers_with_core_again(recompute: RecomputeOptions, layers: int) -> range:
    if recompute.granularity is Granularity.full:
        return range(layers if recompute.method is Method.uniform else recompute.num_layers or 0)
    return range(layers if "core_attn" in (recompute.modules or ()) else 0)


def test_it_looks_before_the_switch_every_interval_and_at_the_end(make_config: MakeConfig, tmp_path: Path) -> None:
    offload = OffloadOptions(OffloadKind.fine_grained, min_bytes=0)
    config = make_config(steps=22, log_every=10, offload=offload, baseline=BaselineConfig(steps=2))
    watcher = Recorder()
    train(config, tmp_path, "", watcher)
    assert [(interval.step, interval.under) for interval in watcher.intervals] == [
        (5, "keep"),
        (10, "plan"),
        (20, "plan"),
        (22, "plan"),
    ]
    # five, ten and two steps under the plan: of two nothing can be told beyond the warm-up
    assert [interval.delta is not None for interval in watcher.intervals] == [False, True, True, False]
    kept, planned = watcher.intervals[0], watcher.intervals[1]
    assert kept.copies is not None and (kept.copies.out_bytes, kept.copies.back_bytes) == (0, 0)
    assert planned.copies is not None
    moved = watcher.steps[9].memory.offloaded_bytes
    assert planned.copies.out_bytes == planned.copies.back_bytes == moved > 0
    by_action = [sum(actions.get("offload", 0) for actions in interval.sites.values()) for interval in (kept, planned)]
    assert by_action == [0, moved]


@pytest.mark.parametrize("optimizer", list(OptimizerName))
def test_what_lies_in_memory_is_counted_by_hand(
    make_config: MakeConfig, tmp_path: Path, optimizer: OptimizerName
) -> None:
    watcher = Recorder()
    optim: dict[str, Any] = {"name": optimizer, "warmup_steps": 0}
    train(make_config(steps=2, log_every=2, eval_batches=0, optim=optim, baseline=OFF), tmp_path, "", watcher)
    assert watcher.info is not None
    fp32 = 4 * watcher.info.parameters
    categories = watcher.intervals[-1].categories
    # the gradient buffer is padded; Adam has two moments a weight and a step of 4 bytes for each tensor
    states = {OptimizerName.adam: 2 * fp32, OptimizerName.sgd: fp32, OptimizerName.none: 0}[optimizer]
    assert categories["weights"] == fp32
    assert fp32 <= categories["gradients"] < fp32 * 1.01
    assert states <= categories["optimizer"] < states + 200
    assert categories["stash"] + categories["loss head"] == watcher.steps[-1].memory.peak_saved_bytes
    # logits' softmax in fp32, at least
    assert categories["loss head"] > 4 * 4 * 16 * 256
    assert not torch.cuda.is_available() or categories["workspace"] >= 0
