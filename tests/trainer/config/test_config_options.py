"""Every option of every group composes and can run; so do all pairs of recompute and offload."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from trainer.config.arguments import parse_arguments
from trainer.config.compose import Composition, compose_command
from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.rules import validate
from trainer.plan import read_plan

CONF = Path(__file__).parents[3] / "conf"
OPTIONS = sorted(
    (file.parent.relative_to(CONF).as_posix(), file.stem) for file in CONF.rglob("*.yaml") if file.parent != CONF
)
#: what an option can't do without
COMPANIONS = {
    ("parallel", "tensor8"): ["model=llama3_8b"],
    ("parallel", "interleaved2"): ["trainer.global_batch_size=32"],
}
#: options that look at a GPU
ON_A_GPU = (("profile", "memory"), ("profile", "nvtx"))
#: keys for which some of a search's jobs are refused, and so pruned
PRUNED_FOR = {("experiment", "search"): "offload.fraction"}


def compose(*overrides: str) -> Composition:
    return compose_command(parse_arguments(overrides))


def companions(group: str, option: str, folder: Path) -> list[str]:
    if (group, option) == ("plan", "file"):
        (folder / "plan.yaml").write_text("num_layers: 4\n")
        return [f"plan.path={folder}/plan.yaml"]
    if (group, option) == ("baseline", "file"):
        return [f"baseline.path={folder}"]
    if (group, option) == ("data", "text"):
        (folder / "a.txt").write_text("text")
        return [f"data.path={folder}/*.txt"]
    if (group, option) == ("data", "megatron"):
        for suffix in (".bin", ".idx"):
            (folder / f"corpus{suffix}").touch()
        return [f"data.path={folder}/corpus", "data.vocab_size=32000"]
    return COMPANIONS.get((group, option), [])


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_and_validates(group: str, option: str, tmp_path: Path, cpu: Machine, gpu: Machine) -> None:
    composition = compose(f"{group}={option}", *companions(group, option, tmp_path))
    assert composition.jobs
    checked_here = composition.sweep is None or composition.sweep.check_first
    machine = cpu if checked_here and (group, option) not in ON_A_GPU else gpu
    problems = [problem for job in composition.jobs for problem in validate(job.config, machine)]
    assert [problem for problem in problems if problem.key != PRUNED_FOR.get((group, option))] == []


def test_every_group_of_the_design_is_there() -> None:
    expected = (
        "model recompute offload plan engine data optim parallel logger hardware cluster experiment team hydra/launcher"
    )
    assert set(expected.split()) <= {group for group, _ in OPTIONS}


@pytest.mark.parametrize("offload", ["none", "fine_grained", "layerwise"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_pair_validates(recompute: str, offload: str, cpu: Machine) -> None:
    (job,) = compose(f"recompute={recompute}", f"offload={offload}").jobs
    assert (job.config.recompute.granularity.name, job.config.offload.kind.name) == (recompute, offload)
    assert validate(job.config, cpu) == []


def test_defaults_are_the_documented_ones() -> None:
    (job,) = compose().jobs
    config = job.config
    assert config.model.name == "tiny"
    assert config.recompute.granularity.name == "none"
    assert config.offload.kind.name == "none"
    assert config.plan.source.name == "options"
    assert config.engine.name.name == "stash"
    assert config.data.source.name == "stdlib"
    assert config.optim.name.name == "adam"
    assert config.parallel.tensor == config.parallel.pipeline == 1
    assert config.logger.wandb_mode is None
    assert config.hardware.name == "auto"
    assert (config.strict, config.validate_only, config.resume, config.team) == (False, False, None, None)


def test_full_ships_uniform_of_one_layer() -> None:
    recompute = compose("recompute=full").jobs[0].config.recompute
    assert recompute.method is not None
    assert (recompute.method.name, recompute.num_layers, recompute.modules) == ("uniform", 1, None)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_each_file_says_in_its_first_lines_what_it_is(group: str, option: str) -> None:
    lines = (CONF / group / f"{option}.yaml").read_text().splitlines()
    comment = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert comment.startswith("# ") and len(comment) > 10


def test_pairs_is_a_sweep_of_nine() -> None:
    composition = compose("experiment=pairs", "trainer.steps=3")
    assert composition.sweep is not None
    seen = {(job.config.recompute.granularity.name, job.config.offload.kind.name) for job in composition.jobs}
    assert len(composition.jobs) == len(seen) == 9
    assert {job.config.trainer.steps for job in composition.jobs} == {3}


@cache
def frontier(setting: str) -> Composition:
    return compose(f"experiment=frontier_{setting}")


@pytest.mark.parametrize("setting", "abc")
def test_frontier_measures_keeping_everything_first_and_last(setting: str) -> None:
    jobs = frontier(setting).jobs
    names = [job.config.logger.name for job in jobs]
    assert (names[0], names[-1]) == ("keep", "keep_last")
    assert len(set(names)) == len(names) > 10
    for job in jobs:
        engine = job.config.engine.name.name
        assert engine == ("megatron" if str(job.config.logger.name).startswith("native_") else "stash")


def test_rows_may_be_chosen_and_multiply_with_values() -> None:
    only = "hydra.sweeper.only=[ours_act,keep]"
    jobs = compose("experiment=frontier_a", only, "trainer.seed=1,2").jobs
    seen = [(job.config.logger.name, job.config.trainer.seed) for job in jobs]
    assert seen == [("keep", 1), ("ours_act", 1), ("keep", 2), ("ours_act", 2)]


def test_an_unknown_row_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no row ours_akt\. Did you mean ours_act\?"):
        compose("experiment=frontier_a", "hydra.sweeper.only=[ours_akt]")


def test_every_plan_that_comes_along_is_used_and_fits() -> None:
    jobs = [job for setting in "abc" for job in frontier(setting).jobs]
    used = {job.config.plan.path for job in jobs} - {None}
    assert used == {path.name for path in (CONF / "plans").iterdir()}
    for job in jobs:
        if job.config.plan.path is not None:
            read_plan(job.config)


def test_list_sweeps_count_lists_not_their_members() -> None:
    one = compose("-m", "recompute=selective", "recompute.modules=[core_attn,mlp]")
    two = compose("-m", "recompute=selective", "recompute.modules=[core_attn,mlp],[mlp]")
    assert [job.config.recompute.modules for job in one.jobs] == [["core_attn", "mlp"]]
    assert [job.config.recompute.modules for job in two.jobs] == [["core_attn", "mlp"], ["mlp"]]


def test_a_value_on_the_command_line_wins_over_an_experiment() -> None:
    assert compose("trainer.steps=7", "experiment=smoke").jobs[0].config.trainer.steps == 7


def test_interpolation_is_resolved() -> None:
    (job,) = compose("optim.min_lr=${optim.lr}", "optim.lr=0.25").jobs
    assert job.config.optim.min_lr == 0.25
    assert job.resolved.optim.min_lr == 0.25
