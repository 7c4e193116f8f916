"""Wrong words on the command line and in configuration files: exit code 2, one line each, nothing left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config.arguments import parse_arguments
from trainer.config.compose import compose_command
from trainer.config.errors import ConfigError, ConfigErrors

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

#: arguments, key, words
BAD = [
    # a key misspelt, in every spelling
    ("recompute.granlarity=full", "recompute.granlarity", "Did you mean recompute.granularity?"),
    ("+recompute.granlarity=full", "recompute.granlarity", "Did you mean recompute.granularity?"),
    ("++recompute.granlarity=full", "recompute.granlarity", "Did you mean recompute.granularity?"),
    ("-m recompute.granlarity=full,none", "recompute.granlarity", "Did you mean recompute.granularity?"),
    ("lr=0.1", "lr", "Did you mean optim.lr?"),
    ("optim.learning_rat=0.1", "optim.learning_rat", "Keys of optim: name, lr"),
    ("+optimm.lr=1", "optimm.lr", "Did you mean optim.lr?"),
    ("qwertz.asdf=1", "qwertz.asdf", "Sections: model, recompute"),
    ("recompte=full", "recompte", "Did you mean recompute?"),
    ("model.num_layers.x=1", "model.num_layers.x", "write model.num_layers=VALUE"),
    ("hydra.run.dirr=x", "hydra.run.dirr", "Did you mean hydra.run.dir?"),
    # groups and options
    ("recompute=fulll", "recompute=fulll", "Did you mean full? Choices: full, none, selective"),
    ("-m recompute=none,fulll", "recompute=fulll", "Did you mean full?"),
    ("model=3", "model=3", "Choices: gpt2_125m"),
    ("recompute=[none,full]", "recompute", "takes one option"),
    ("+recompute=full", "recompute", "Write recompute=full, without the +"),
    ("+experiment=smoke", "experiment", "Write experiment=smoke, without the +"),
    ("experiment=smok", "experiment=smok", "Did you mean smoke?"),
    ("+team=x", "team=x", "--config-dir FOLDER team=x"),
    ("team=x", "team=x", "--config-dir FOLDER team=x"),
    ("optim.adam=true", "optim.adam", "write optim=adam"),
    ("recompute/granularity=full", "recompute/granularity", "write recompute.granularity=VALUE"),
    ("hydra/launcher=xx", "hydra/launcher=xx", "Choices: basic"),
    ("recompute={granularity:full}", "recompute", "recompute.KEY=VALUE"),
    ("~model", "model", "nothing can be deleted"),
    # values
    ("trainer=5", "trainer", "trainer.KEY=VALUE; keys: steps"),
    ("trainer.steps=many", "trainer.steps", "many is no whole number"),
    ("trainer.steps=1.5", "trainer.steps", "1.5 is no whole number"),
    ("trainer.steps=true", "trainer.steps", "true is no whole number"),
    ("trainer.steps=null", "trainer.steps", "null is no value"),
    ("optim.lr=fast", "optim.lr", "Write a number"),
    ("strict=maybe", "strict", "strict=true or strict=false"),
    ("recompute.granularity=ful", "recompute.granularity", "Did you mean full? Choices: none, selective, full"),
    ("trainer.precision=fp16", "trainer.precision", "Choices: auto, bf16, fp32"),
    ("hydra.mode=SWEEP", "hydra.mode", "Choices: RUN, MULTIRUN"),
    ("optim.lr=${optim.lrr}", "optim.lr", "${optim.lrr} can't be worked out"),
    ("optim.lr=???", "optim.lr", "needs a value"),
    # lists and other syntax
    ("recompute.modules=core_attn", "recompute.modules", "'recompute.modules=[core_attn]', with the quotes"),
    ("recompute.modules=core_attn,mlp", "recompute.modules", "'recompute.modules=[core_attn,mlp]', with the quotes"),
    ("-m recompute.modules=core_attn,mlp", "recompute.modules", "'recompute.modules=[mlp]'"),
    ("recompute.modules=[core_attn,mlp", "recompute.modules", "'recompute.modules=[core_attn,mlp]', with the quotes"),
    ("recompute.modules=core_attn]", "recompute.modules", "'recompute.modules=[core_attn]'"),
    ("recompute.modules=[core_attn, mlp]", "mlp]", "without spaces"),
    ("logger.name='a", "logger.name", "lacks a closing '"),
    ("recompute full", "recompute", "recompute=VALUE"),
    ("recompute=none,full", "recompute", "Add -m to sweep"),
    ("optim.lr=range(1,3)", "optim.lr", "Add -m to sweep"),
    # flags
    ("--multrun recompute=none", "--multrun", "Did you mean --multirun?"),
    ("--recompute-granularity full", "--recompute-granularity", "recompute.granularity=VALUE"),
    ("--num-layers=3", "--num-layers", "model.num_layers=VALUE"),
    ("--config-dir", "command line", "expected one argument"),
    ("--config-dir nowhere", "--config-dir", "there is no folder nowhere"),
    ("--config-name confg", "--config-name", "Did you mean config?"),
    ("--cfg jobb", "command line", "invalid choice"),
    ("-m --cfg job", "command line", "exclude each other"),
    ("hydra.searchpath=[file://nowhere]", "hydra.searchpath", "nowhere is not there"),
]

#: a team's file, its text, words that the error must have
BAD_FILES = [
    (
        "recompute/acme.yaml",
        "granlarity: full\n",
        ["recompute.granlarity", "recompute/acme.yaml", "recompute.granularity?"],
    ),
    (
        "recompute/acme.yaml",
        "granularity: ful\n",
        ["recompute.granularity", "recompute/acme.yaml", "Did you mean full?"],
    ),
    ("recompute/acme.yaml", "num_layers: x\n", ["recompute.num_layers", "recompute/acme.yaml", "'x'"]),
    ("recompute/acme.yaml", "granularity: [full\nmethod: block\n", ["acme.yaml, line 2", "not YAML"]),
    ("recompute/acme.yaml", "num_layers: ${model.num_layer}\n", ["recompute.num_layers", "${model.num_layer}"]),
    ("recompute/acme.yaml", "defaults: [ful]\n", ["recompute/ful", "recompute/acme.yaml", "Did you mean full?"]),
    ("recompute/acme.yaml", "- full\n", ["recompute/acme"]),
    ("recompute/full.yaml", "granularity: full\n", ["--config-dir", "is hidden by recompute/full.yaml"]),
]


def problems(arguments: list[str]) -> list[ConfigError]:
    try:
        compose_command(parse_arguments(arguments))
    except ConfigErrors as error:
        return list(error.problems)
    except ConfigError as error:
        return [error]
    return []


@pytest.mark.parametrize(("arguments", "key", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad(arguments: str, key: str, words: str) -> None:
    # the shell splits at spaces
    found = problems(arguments.split())
    assert any(problem.key == key and words in str(problem) for problem in found), found
    assert all("\n" not in str(problem) for problem in found)


@pytest.mark.parametrize(("file", "text", "words"), BAD_FILES, ids=[repr(row[1]) for row in BAD_FILES])
def test_bad_file(file: str, text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (problem,) = problems(["--config-dir", str(tmp_path), f"recompute={path.stem}"])
    for word in words:
        assert word in str(problem)


def test_every_bad_word_is_told_at_once() -> None:
    found = problems(["recompute.granlarity=full", "+optim.lrr=1", "recompute=fulll", "trainer.steps=x"])
    assert [problem.key for problem in found] == [
        "recompute.granlarity",
        "optim.lrr",
        "recompute=fulll",
        "trainer.steps",
    ]


def test_team_library_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "acme.yaml").write_text("# @package _global_\nteam: acme\nmodel: {num_layers: 2}\n")
    (job,) = compose_command(parse_arguments(["--config-dir", str(tmp_path), "+team=acme"])).jobs
    assert (job.config.team, job.config.model.num_layers) == ("acme", 2)
    assert "Did you mean acme?" in str(problems(["--config-dir", str(tmp_path), "+team=acm"])[0])
    assert "no team library" in str(problems(["+team=acme"])[0])


def test_several_folders_add_up(tmp_path: Path) -> None:
    for name, steps in (("one", 11), ("two", 22)):
        (tmp_path / name / "experiment").mkdir(parents=True)
        text = f"# @package _global_\ntrainer: {{steps: {steps}}}\n"
        (tmp_path / name / "experiment" / f"{name}.yaml").write_text(text)
    folders = ["--config-dir", str(tmp_path / "one"), "--config-dir", str(tmp_path / "two")]
    for name, steps in (("one", 11), ("two", 22)):
        (job,) = compose_command(parse_arguments([*folders, f"experiment={name}"])).jobs
        assert job.config.trainer.steps == steps


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "+recompute.granlarity=full",
            "error: recompute.granlarity: there is no such key. Did you mean recompute.granularity?",
        ),
        ("+team=x", "error: team=x: no team library is in sight."),
        ("recompute.num_layers=3", "error: recompute.num_layers: would do nothing"),
        ("-m recompute=none,fulll", "error: recompute=fulll: recompute has no such option."),
        ("--cfg job model.hidden_size=130", "error: model.hidden_size: 130 is no multiple"),
        ("parallel=tensor2", "torchrun --standalone --nproc-per-node=2 train.py"),
        ("optim.lr=${optim.lrr}", "error: optim.lr: ${optim.lrr} can't be worked out"),
    ],
)
def test_exit_code_2_and_nothing_left(arguments: str, words: str, cli: Cli, tmp_path: Path) -> None:
    done = cli(*arguments.split())
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_process_speaks(cli: Cli) -> None:
    done = cli("recompute=fulll", RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (2, "")


def test_sweep_under_torchrun_is_refused(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "recompute=none,full", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "Start the sweep without torchrun" in done.stderr
    assert list(tmp_path.iterdir()) == []
