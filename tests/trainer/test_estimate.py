"""The estimate of a configuration: against parameters counted elsewhere, published layouts, and the run itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from models.config import Activation, LossHead, ModelConfig
from models.parameters import parameter_count
from trainer.config.errors import ConfigError
from trainer.config.schema import (
    Config,
    Engine,
    EngineConfig,
    HardwareConfig,
    OptimConfig,
    OptimizerName,
    ParallelConfig,
    PlanConfig,
    PlanSource,
    TrainerConfig,
)
from trainer.estimate import as_json, estimate, lines, parse_budget
from trainer.pipeline import make_setting
from trainer.plan import make_seed

GIB = 1 << 30
H200 = HardwareConfig(name="h200", peak_bf16_tflops=989.4, memory_gib=140.4, link_gbps=64)
LLAMA_3B = ModelConfig(
    name="llama3_2_3b",
    num_layers=28,
    hidden_size=3072,
    ffn_hidden_size=8192,
    num_attention_heads=24,
    num_query_groups=8,
    seq_length=8192,
    vocab_size=128256,
    tied_embeddings=True,
    loss_head=LossHead.chunked,
)


def _config(**fields: object) -> Config:
    return replace(
        Config(model=LLAMA_3B, hardware=H200, trainer=TrainerConfig(micro_batch_size=1)),
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "memory_gib", "expected"),
    [
        ("70GiB", None, 70 * GIB),
        ("1.5 MiB", None, 3 << 19),
        ("0.5", 140.4, int(0.5 * 140.4 * GIB)),
        ("1", 2.0, 2 * GIB),
    ],
)
def test_budgets(text: str, memory_gib: float | None, expected: int) -> None:
    assert parse_budget(text, memory_gib) == expected


@pytest.mark.parametrize(
    ("text", "words"), [("70", "no unit"), ("-1GiB", "no amount"), ("x", "no amount"), ("0", "no")]
)
def test_bad_budgets(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_budget(text, 80.0)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(tensor=2, sequence_parallel=True),
        ParallelConfig(pipeline=4),
        ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=7, overlap_p2p_comm=True),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_states_are_those_of_the_models_parameters(parallel: ParallelConfig, tied: bool) -> None:
    model = replace(LLAMA_3B, tied_embeddings=tied)
    stages = make_setting(_config(model=model, parallel=parallel), has_cuda=True).pipeline.stages
    counted = parallel.tensor * sum(stage.weight_bytes for stage in stages) / 2
    padded = model.padded_vocab_size(128256, parallel.tensor)
    again = padded * model.hidden_size if tied and parallel.pipeline > 1 else 0
    # norm weights are on every tensor-parallel rank
    assert counted == pytest.approx(parameter_count(model, padded) + again, rel=1e-3)
    for stage in stages:
        assert stage.gradient_bytes == 2 * stage.weight_bytes and stage.optimizer_bytes == 6 * stage.weight_bytes


def test_biases_and_layer_norms_are_counted() -> None:
    model = replace(LLAMA_3B, bias=True, activation=Activation.gelu)
    (stage,) = make_setting(_config(model=model), has_cuda=True).pipeline.stages
    assert stage.weight_bytes == 2 * parameter_count(model, 128256)


def test_the_distributed_optimizer_shares_its_state_out() -> None:
    plan = PlanConfig(processes=8)
    whole = make_setting(_config(plan=plan), has_cuda=True).pipeline.stages[0]
    shared = ParallelConfig(distributed_optimizer=True)
    part = make_setting(_config(plan=plan, parallel=shared), has_cuda=True).pipeline.stages[0]
    assert part.optimizer_bytes * 8 == whole.optimizer_bytes
    assert part.weight_bytes == whole.weight_bytes


def test_sequence_and_tensor_parallel_ranks_share_activations() -> None:
    one = make_setting(_config(), has_cuda=True).pipeline.keep.simulations[0].by_category["saved"]
    two = ParallelConfig(tensor=2, sequence_parallel=True)
    half = make_setting(_config(parallel=two), has_cuda=True).pipeline.keep.simulations[0].by_category["saved"]
    assert half == pytest.approx(one / 2, rel=0.01)


def test_the_json_of_an_automatic_plan() -> None:
    config = _config(
        plan=PlanConfig(source=PlanSource.auto, budget="60GiB"),
        trainer=TrainerConfig(micro_batch_size=4),
    )
    found = estimate(config, make_seed(config, True).plan, has_cuda=True)
    written = json.loads(json.dumps(as_json(found)))
    assert written["peak_bytes"] <= 60 * GIB < written["keep"]["peak_bytes"]
    assert sum(written["by_category"].values()) == written["peak_bytes"]
    assert written["lower_bound_s"] <= written["step_s"]
    assert 0.3 < written["mfu"] < 0.7
    assert written["offloaded_bytes"] > 0 and written["plan"]["num_layers"] == 28
    assert written["assumptions"]
    text = "\n".join(lines(found))
    assert "binding: memory at" in text and "What memory costs:" in text


def test_a_budget_too_small_names_the_one_to_write() -> None:
    config = _config(plan=PlanConfig(source=PlanSource.auto, budget="20GiB"))
    with pytest.raises(ConfigError) as caught:
        make_seed(config, True)
    remedy = caught.value.remedy
    smallest = remedy.split("plan.budget=")[1].split(",")[0]
    assert make_seed(replace(config, plan=replace(config.plan, budget=smallest)), True).plan


@pytest.mark.parametrize("name", list(OptimizerName))
def test_gradients_grow_only_without_an_optimizer(name: OptimizerName) -> None:
    (stage,) = make_setting(_config(optim=OptimConfig(name=name)), has_cuda=True).pipeline.stages
    assert stage.gradients_grow is (name is OptimizerName.none) is (stage.gradient_bytes == 0)


def test_megatrons_engine_has_megatrons_loss_head() -> None:
    model = replace(LLAMA_3B, loss_head=LossHead.auto)
    ours, theirs = (
        make_setting(_config(model=model, engine=EngineConfig(name)), has_cuda=True).pipeline.stages[-1].head
        for name in Engine
    )
    assert theirs.kept_bytes > ours.kept_bytes


def test_validate_only_predicts(cli_estimate: Callable[..., str]) -> None:
    text = cli_estimate("plan=auto", "plan.budget=70GiB", "hardware=h200", "model=llama3_8b", "model.num_layers=8")
    assert "Estimate for 1 x h200" in text and "MFU" in text and "assumed:" in text


@pytest.fixture
def cli_estimate(tmp_path: Path) -> Callable[..., str]:
    import subprocess
    import sys

    def run(*arguments: str) -> str:
        train = Path(__file__).parents[2] / "train.py"
        done = subprocess.run(
            [sys.executable, str(train), *arguments, "trainer.micro_batch_size=2", "validate_only=true"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.iterdir()) == []
        return done.stdout

    return run
