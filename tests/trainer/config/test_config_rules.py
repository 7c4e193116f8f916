"""Each rule between keys: what breaks it, which key it names, and what it says to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.machine import Machine
from trainer.config.rules import validate
from trainer.config.schema import Config

ConfigOf = Callable[..., Config]

SELECTIVE = "recompute.granularity=selective"
FULL = "recompute.granularity=full recompute.method=uniform recompute.num_layers=1"
FINE = "offload.kind=fine_grained"
LAYERS = "offload.kind=layerwise"
MEGATRON = "engine.name=megatron"

#: settings, key of the one problem, words of its text
BAD = [
    # model
    ("model.num_layers=0", "model.num_layers", "model.num_layers=1 or more"),
    ("model.seq_length=-1", "model.seq_length", "is too small"),
    ("model.attention_dropout=1.0", "model.attention_dropout", "[0, 1)"),
    ("model.layernorm_epsilon=0", "model.layernorm_epsilon", "above 0"),
    ("model.layernorm_epsilon=.nan", "model.layernorm_epsilon", "nan is not above 0"),
    ("model.hidden_size=130", "model.hidden_size", "model.hidden_size=128"),
    ("model.num_query_groups=3", "model.num_query_groups", "Choices: 1, 2, 4"),
    ("model.num_query_groups=8", "model.num_query_groups", "do not share 4 heads"),
    ("model.kv_channels=33", "model.kv_channels", "even model.kv_channels"),
    ("model.position=learned model.rope_scaling_factor=8", "model.rope_scaling_factor", "positions are learned"),
    ("model.attention=te", "model.attention", "no GPU and no Transformer Engine"),
    ("model.extras.hidden_size=3", "model.extras.hidden_size", "Write model.hidden_size="),
    ("model.extras.cpu_offloading=true", "model.extras.cpu_offloading", "Write offload.kind="),
    ("model.extras.qk_layernrom=true", "model.extras.qk_layernrom", "Did you mean qk_layernorm?"),
    # recompute
    ("recompute.modules=[mlp]", "recompute.modules", "Add recompute=selective"),
    (f"{SELECTIVE} recompute.modules=[core_atn]", "recompute.modules", "Did you mean core_attn?"),
    ("recompute.method=block", "recompute.method", "Add recompute=full"),
    ("recompute.num_layers=2", "recompute.num_layers", "Add recompute=full"),
    (f"{SELECTIVE} recompute.num_layers=2", "recompute.num_layers", "Write recompute=full"),
    (f"{SELECTIVE} recompute.method=uniform", "recompute.method", "Write recompute=full"),
    (
        f"{SELECTIVE} recompute.distribute_saved_activations=true parallel.tensor=2",
        "recompute.distribute_saved_activations",
        "Write recompute=full",
    ),
    (f"{SELECTIVE} recompute.modules=[]", "recompute.modules", "recompute.modules=null"),
    (f"{SELECTIVE} recompute.modules=[mlp,mlp]", "recompute.modules", "mlp is named twice"),
    (f"{SELECTIVE} recompute.modules=[mlp,mlp_act]", "recompute.modules", "Drop mlp_act or mlp"),
    (f"{SELECTIVE} recompute.modules=[moe_act]", "recompute.modules", "this model has no experts"),
    (f"{SELECTIVE} recompute.modules=[mla_up_proj]", "recompute.modules", "no multi-latent attention"),
    (f"{SELECTIVE} recompute.modules=[gdn_norm_out]", "recompute.modules", "no gated delta net"),
    (f"{SELECTIVE} recompute.modules=[qkv_linear]", "recompute.modules", "is a name of offload.modules"),
    ("recompute.granularity=full recompute.num_layers=1", "recompute.method", "Choices: uniform, block"),
    ("recompute.granularity=full recompute.method=block", "recompute.num_layers", "recompute.num_layers=1"),
    (f"{FULL} recompute.num_layers=0", "recompute.num_layers", "from 1 to 4"),
    (f"{FULL} recompute.num_layers=5", "recompute.num_layers", "from 1 to 4"),
    (f"{FULL} recompute.num_layers=3 parallel.pipeline=2", "recompute.num_layers", "from 1 to 2"),
    (f"{FULL} recompute.modules=[mlp]", "recompute.modules", "Write recompute=selective"),
    (
        f"{FULL} recompute.distribute_saved_activations=true",
        "recompute.distribute_saved_activations",
        "Add parallel.tensor=2",
    ),
    (
        f"{FULL} recompute.distribute_saved_activations=true parallel.tensor=2 parallel.sequence_parallel=true",
        "recompute.distribute_saved_activations",
        "parallel.sequence_parallel=false",
    ),
    # offload
    ("offload.modules=[mlp_act]", "offload.modules", "Add offload=fine_grained"),
    ("offload.num_layers=2", "offload.num_layers", "Add offload=layerwise"),
    ("offload.weights=true", "offload.weights", "offload.weights=false"),
    (f"{FINE} offload.num_layers=2", "offload.num_layers", "Add offload=layerwise"),
    (f"{FINE} offload.double_buffering=true", "offload.double_buffering", "by module, not by layer"),
    (f"{FINE} offload.modules=[]", "offload.modules", "an empty list"),
    (f"{FINE} offload.modules=[mlp_fc2]", "offload.modules", "Did you mean mlp_fc1?"),
    (f"{FINE} offload.modules=[expert_fc1]", "offload.modules", "this model has no experts"),
    (f"{FINE} offload.modules=[layernorm]", "offload.modules", "is a name of recompute.modules"),
    (f"{FINE} offload.fraction=0", "offload.fraction", "offload=none"),
    (f"{FINE} offload.fraction=1.5", "offload.fraction", "up to 1"),
    (f"{FINE} offload.min_bytes=-1", "offload.min_bytes", "offload.min_bytes=0 or more"),
    (f"{FINE} offload.activations=false", "offload.activations", "offload=none"),
    (f"{LAYERS} offload.modules=[mlp_act]", "offload.modules", "Add offload=fine_grained"),
    (f"{LAYERS} offload.fraction=0.5", "offload.fraction", "Add offload=fine_grained"),
    (f"{LAYERS} offload.num_layers=0", "offload.num_layers", "from 1 to 3"),
    (f"{LAYERS} offload.num_layers=4", "offload.num_layers", "from 1 to 3"),
    (f"{LAYERS} offload.activations=false", "offload.activations", "leaves nothing to offload"),
    (f"{LAYERS} model.num_layers=1", "offload", "offload=fine_grained"),
    # parallel
    ("parallel.tensor=0", "parallel.tensor", "parallel.tensor=1 or more"),
    ("parallel.tensor=8 model.num_query_groups=1", "model.num_attention_heads", "parallel.tensor=8"),
    ("parallel.tensor=2 model.ffn_hidden_size=511", "model.ffn_hidden_size", "parallel.tensor=2"),
    (
        "parallel.tensor=2 model.num_attention_heads=12 model.hidden_size=96 model.num_query_groups=3",
        "model.num_query_groups",
        "neither a multiple nor a divisor",
    ),
    ("parallel.sequence_parallel=true", "parallel.sequence_parallel", "Add parallel.tensor=2"),
    ("parallel.tensor=2 parallel.sequence_parallel=true model.seq_length=127", "model.seq_length", "equal part"),
    ("parallel.pipeline=3", "model.num_layers", "parallel.pipeline=3"),
    ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline", "Add parallel.pipeline=2"),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=2 trainer.global_batch_size=32",
        "parallel.virtual_pipeline",
        "Add parallel.overlap_p2p_comm=true",
    ),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=3 parallel.overlap_p2p_comm=true trainer.global_batch_size=32",
        "model.num_layers",
        "parallel.pipeline x parallel.virtual_pipeline=6",
    ),
    ("parallel.pipeline=2 parallel.overlap_p2p_comm=true", "parallel.overlap_p2p_comm", "parallel.virtual_pipeline=2"),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=2 parallel.overlap_p2p_comm=true trainer.global_batch_size=8",
        "trainer.global_batch_size",
        "trainer.global_batch_size=16",
    ),
    ("parallel.context=2", "parallel.context", "no GPU and no Transformer Engine"),
    ("parallel.context=2 model.attention=sdpa", "parallel.context", "model.attention=te"),
    ("parallel.expert=2", "parallel.expert", "no experts"),
    (
        "parallel.overlap_param_gather=true parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather",
        "Add parallel.distributed_optimizer=true",
    ),
    (
        "parallel.overlap_param_gather=true parallel.distributed_optimizer=true",
        "parallel.overlap_param_gather",
        "Add parallel.overlap_grad_reduce=true",
    ),
    # measure
    ("baseline.steps=0", "baseline.steps", "baseline.steps=1 or more"),
    ("profile.kind=memory", "profile.kind", "Write profile=trace"),
    ("profile.kind=nvtx", "profile.kind", "this machine has none"),
    ("profile.steps=0", "profile.steps", "profile.steps=1 or more"),
    ("guard.peak=-1", "guard.peak", "guard.peak=0 or more"),
    ("baseline.mode=file", "baseline.path", "Add baseline.path=FOLDER"),
    ("baseline.mode=file baseline.path=no/such", "baseline.path", "there is no folder no/such"),
    ("baseline.path=outputs", "baseline.path", "only baseline=file reads it"),
    # run
    ("trainer.steps=0", "trainer.steps", "trainer.steps=1 or more"),
    ("trainer.seed=0", "trainer.seed", "trainer.seed=1 or more"),
    ("trainer.global_batch_size=12", "trainer.global_batch_size", "8"),
    ("trainer.eval_every=5 trainer.eval_batches=0", "trainer.eval_every", "trainer.eval_batches=8"),
    ("optim.lr=0", "optim.lr", "above 0"),
    ("optim.beta2=1", "optim.beta2", "[0, 1)"),
    ("optim.min_lr=1", "optim.min_lr", "above optim.lr="),
    ("optim.name=none trainer.checkpoint_every=5", "trainer.checkpoint_every", "weights stay as they are"),
    (
        "optim.name=none parallel.distributed_optimizer=true",
        "parallel.distributed_optimizer",
        "weights stay as they are",
    ),
    ("report=.", "report", "holds no jobs of a sweep"),
    ("report=nowhere", "report", "there is no folder nowhere"),
    ("optim.warmup_steps=500", "optim.warmup_steps", "trainer.steps=500"),
    ("optim.warmup_steps=10 trainer.schedule_steps=10", "optim.warmup_steps", "trainer.schedule_steps=10"),
    ("plan.path=x.yaml", "plan.path", "Add plan=file"),
    ("plan.source=file", "plan.path", "Add plan.path=FILE"),
    ("plan.source=file plan.path=/nowhere/plan.yaml", "plan.path", "there is no file /nowhere/plan.yaml"),
    ("plan.budget=4GiB", "plan.budget", "Add plan=auto"),
    ("plan.objective=memory", "plan.objective", "Add plan=auto"),
    ("plan.source=auto plan.path=x.yaml", "plan.path", "Add plan=file"),
    ("plan.source=auto plan.budget=4", "plan.budget", "no unit"),
    ("plan.source=auto plan.budget=4GB", "plan.budget", "4GB is no amount of memory"),
    ("plan.source=auto plan.budget=1MiB", "plan.budget", "Write plan.budget="),
    ("plan.source=auto plan.max_slowdown=0.1", "plan.max_slowdown", "Add plan.objective=memory"),
    (f"plan.source=auto {SELECTIVE}", "recompute", "decides itself"),
    (f"plan.source=auto {FINE}", "offload", "decides itself"),
    ("plan.source=auto plan.processes=0", "plan.processes", "is too small"),
    ("resume=/nowhere", "resume", "there is no folder /nowhere"),
    ("hardware.match='['", "hardware.match", "not a regular expression"),
    ("logger.base_url=wandb.example", "logger.base_url", "https://"),
    # data
    ("data.path=x", "data.path", "Add data=text"),
    ("data.source=text", "data.path", "Add data.path="),
    ("data.source=text data.path=/nowhere/*.txt", "data.path", "no file matches /nowhere/*.txt"),
    ("data.source=text data.path=/", "data.path", "is a folder"),
    ("data.source=text data.path=[]", "data.path", "names no files"),
    ("data.source=megatron data.path=/nowhere/c.bin data.vocab_size=9", "data.path", "Write data.path=/nowhere/c"),
    ("data.source=megatron data.path=[a,b] data.vocab_size=9", "data.path", "[0.7,PREFIX,0.3,PREFIX]"),
    ("data.source=megatron data.path=[0.5,a,0.5] data.vocab_size=9", "data.path", "weights above 0"),
    ("data.tokenizer=/nowhere.json", "data.tokenizer", "tokenizer.json"),
    ("data.vocab_size=9", "data.vocab_size", "the tokenizer says it"),
    ("data.source=mock data.vocab_size=300 model.vocab_size=256", "data.vocab_size", "256 or less"),
    ("model.vocab_size=100", "model.vocab_size", "model.vocab_size=256"),
    ("data.split='1,2'", "data.split", "three shares"),
    ("data.split='0,1,0'", "data.split", "nothing to train on"),
    ("data.split='1,0,0'", "data.split", "trainer.eval_batches=0"),
]

#: the same for engine=megatron on a GPU with Transformer Engine
BAD_MEGATRON = [
    (f"{FULL} {LAYERS}", "offload", "recompute=none"),
    (f"{SELECTIVE} {LAYERS}", "offload", "engine=stash"),
    (f"{LAYERS} parallel.pipeline=2", "offload", "pipeline stages"),
    (f"{LAYERS} offload.double_buffering=true", "offload.double_buffering", "ignores it"),
    (f"{LAYERS} offload.min_bytes=5", "offload.min_bytes", "engine=stash"),
    (f"{FULL} {FINE}", "offload", "wrong groups"),
    (f"{FINE} offload.modules=[attn_proj]", "offload.modules", "add core_attn"),
    (f"{FINE} offload.modules=[mlp_act]", "offload.modules", "Megatron has no mlp_act"),
    (f"{SELECTIVE} {FINE}", "offload.modules", "never offloads core_attn and attn_proj"),
    (
        f"{SELECTIVE} recompute.modules=[core_attn] {FINE} offload.modules=[core_attn]",
        "offload.modules",
        "never offloads",
    ),
    (f"{SELECTIVE} recompute.modules=[mlp_act]", "recompute.modules", "Megatron has no mlp_act"),
    (f"{SELECTIVE} recompute.modules=[mlp] model.bias=true", "recompute.modules", "without end"),
    (f"{SELECTIVE} recompute.modules=[layernorm] strict=true", "recompute.modules", "fuse the norms"),
    ("model.attention=sdpa", "model.attention", "model.attention=auto"),
    ("plan.source=file plan.path=/nowhere", "engine.name", "plan=options"),
    ("plan.source=auto", "engine.name", "plan=options"),
]


@pytest.mark.parametrize(("settings", "key", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad(settings: str, key: str, words: str, config_of: ConfigOf, cpu: Machine) -> None:
    (problem,) = validate(config_of(*settings.split()), cpu)
    assert problem.key == key
    assert words in str(problem)


@pytest.mark.parametrize(("settings", "key", "words"), BAD_MEGATRON, ids=[row[0] for row in BAD_MEGATRON])
def test_bad_for_megatron(settings: str, key: str, words: str, config_of: ConfigOf, gpu: Machine) -> None:
    found = validate(config_of(MEGATRON, *settings.split()), gpu)
    assert any(problem.key == key and words in str(problem) for problem in found), found


@pytest.mark.parametrize(
    "settings",
    [
        f"{FULL} {LAYERS}",
        f"{FULL} {FINE}",
        f"{SELECTIVE} recompute.modules=[core_attn] {FINE} offload.modules=[core_attn,attn_proj]",
        f"{FINE} offload.modules=[attn_proj]",
        f"{SELECTIVE} recompute.modules=[mlp] model.bias=true",
        f"{LAYERS} parallel.pipeline=2",
        f"{SELECTIVE} recompute.modules=[layernorm,core_attn,mlp_act,mlp_fc1]",
        "parallel.tensor=8 model.num_attention_heads=8",
        "parallel.pipeline=4 parallel.virtual_pipeline=1 trainer.global_batch_size=64",
        "recompute.granularity=full recompute.method=block recompute.num_layers=4",
    ],
)
def test_stash_accepts_what_it_can_do(settings: str, config_of: ConfigOf, cpu: Machine) -> None:
    assert validate(config_of(*settings.split()), cpu) == []


@pytest.mark.parametrize(
    "settings",
    ["", FULL, SELECTIVE, FINE, LAYERS, f"{SELECTIVE} recompute.modules=[layernorm,mlp] {FINE}"],
)
def test_megatron_accepts_what_it_can_do(settings: str, config_of: ConfigOf, gpu: Machine) -> None:
    assert validate(config_of(MEGATRON, *settings.split()), gpu) == []


@pytest.mark.parametrize("settings", [FINE, LAYERS])
def test_megatron_offloads_only_on_a_gpu(settings: str, config_of: ConfigOf, cpu: Machine, gpu: Machine) -> None:
    config = config_of(MEGATRON, settings)
    for machine, lacking in (
        (cpu, "no GPU and no Transformer Engine"),
        (replace(gpu, te_version=None), "has no Transformer Engine"),
        (replace(gpu, has_cuda=False), "has no GPU"),
    ):
        found = validate(config, machine)
        assert [problem.key for problem in found] == ["offload"]
        assert str(found[0]).endswith("Write engine=stash") and lacking in str(found[0])


def test_new_transformer_engine_needs_its_first_offload_code(config_of: ConfigOf, gpu: Machine) -> None:
    config = config_of(MEGATRON, FINE)
    without = replace(gpu, environment={})
    (problem,) = validate(config, without)
    assert problem.remedy == "Set NVTE_CPU_OFFLOAD_V1=1 in the environment"
    assert validate(config, replace(without, te_version=(2, 9))) == []


def test_a_misspelt_module_is_told_even_when_nothing_is_recomputed(config_of: ConfigOf, cpu: Machine) -> None:
    found = validate(config_of("recompute.modules=[core_atn]"), cpu)
    assert [problem.remedy.split("?")[0] for problem in found] == [
        "Did you mean core_attn",
        "Add recompute=selective or drop it",
    ]


def test_all_problems_are_told_at_once(config_of: ConfigOf, cpu: Machine) -> None:
    config = config_of("model.num_query_groups=3", "parallel.expert=2", "optim.min_lr=1", "data.split='1'")
    assert [problem.key for problem in validate(config, cpu)] == [
        "model.num_query_groups",
        "parallel.expert",
        "optim.min_lr",
        "data.split",
    ]


def test_processes_must_hold_whole_models(config_of: ConfigOf, cpu: Machine) -> None:
    config = config_of("parallel.tensor=2")
    assert validate(config, replace(cpu, world_size=4)) == []
    (problem,) = validate(config, replace(cpu, world_size=3))
    assert (problem.key, "multiple of 2 processes" in str(problem)) == ("parallel", True)


def test_batch_is_shared_by_the_data_parallel_ranks(config_of: ConfigOf, cpu: Machine) -> None:
    config = config_of("trainer.global_batch_size=16")
    assert validate(config, replace(cpu, world_size=2)) == []
    (problem,) = validate(config, replace(cpu, world_size=4))
    assert (problem.key, "trainer.global_batch_size=32" in str(problem)) == ("trainer.global_batch_size", True)


def test_plan_file_is_read(config_of: ConfigOf, cpu: Machine, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    config = config_of("plan.source=file", f"plan.path={path}")
    path.write_text("num_layers: 4\nlayers: [{layers: 0-1, recompute: [act_out]}]\n")
    assert validate(config, cpu) == []
    path.write_text("num_layers: 3\n")
    assert "model.num_layers=3" in str(validate(config, cpu)[0])
    path.write_text("num_layers: 4\nlayers: [{layers: 0-1, recompute: [act_ou]}]\n")
    assert "did you mean act_out?" in str(validate(config, cpu)[0])
    path.write_text("num_layers: [4\n")
    assert "not YAML" in str(validate(config, cpu)[0])


def test_plan_file_excludes_options(config_of: ConfigOf, cpu: Machine, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("num_layers: 4\n")
    config = config_of("plan.source=file", f"plan.path={tmp_path}/plan.yaml", SELECTIVE, FINE)
    assert [problem.key for problem in validate(config, cpu)] == ["recompute", "offload"]


def test_resume_needs_a_finished_checkpoint(config_of: ConfigOf, cpu: Machine, tmp_path: Path) -> None:
    config = config_of(f"resume={tmp_path}")
    (tmp_path / "checkpoints" / "step_00000010.partial").mkdir(parents=True)
    assert "no finished checkpoint" in str(validate(config, cpu)[0])
    (tmp_path / "checkpoints" / "step_00000010").mkdir()
    assert validate(config, cpu) == []
