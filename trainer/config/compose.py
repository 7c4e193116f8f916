"""From the command line to checked configurations, before Hydra makes a folder or starts a job. Imports no torch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer.config.arguments import Command
from trainer.config.defaults_lists import cycle_problem
from trainer.config.errors import ConfigError, ConfigErrors, raise_if_any
from trainer.config.libraries import find_libraries, library_problems
from trainer.config.overrides import override_problems, parse_overrides, sweep_problems
from trainer.config.provenance import Provenance, with_file
from trainer.config.root import register_schema
from trainer.config.rows import named_rows
from trainer.config.schema import Config
from trainer.config.search_path import CONF, shown_file, use_libraries, use_plugins
from trainer.config.strict import to_config
from trainer.config.translate import broken_yaml, translated

#: jobs of one sweep that are checked before the first starts; each is checked again when it starts
MOST_JOBS = 64


@dataclass(frozen=True)
class Job:
    """One run of the command: a sweep has several."""

    #: all that it was told
    overrides: tuple[str, ...]
    provenance: Provenance
    config: Config
    #: the configuration as composed and resolved
    resolved: DictConfig


@dataclass(frozen=True)
class Sweep:
    """How a sweep is run."""

    folder: str
    #: that the launcher starts for each job
    processes: int
    #: whether one job that can't run stops them all
    check_first: bool


@dataclass(frozen=True)
class Composition:
    jobs: tuple[Job, ...]
    #: None: the command is for one run
    sweep: Sweep | None


def prepare(command: Command) -> None:
    """Tell Hydra of our schema and of the libraries in sight, for every composition of this process.

    Raises ConfigError or ConfigErrors when a library has files that would never be read, or is not there.
    """
    libraries = find_libraries(command.config_dirs)
    raise_if_any(library_problems(libraries))
    use_plugins()
    register_schema()
    use_libraries(libraries)


def compose_command(command: Command) -> Composition:
    """Compose and type-check what a command line asks for: one job, or the first MOST_JOBS of a sweep.

    Raises ConfigErrors with every problem of the first stage that finds one: the words of the command line, then
    composition, then the composed values.
    """
    prepare(command)
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3", job_name="train"):
        return _compose(command)


def _compose(command: Command) -> Composition:
    parsed, problems = parse_overrides(command.overrides)
    raise_if_any(problems)
    swept = [override for override in parsed if override.is_sweep_override()]
    fixed = [override for override in parsed if not override.is_sweep_override()]
    loader = GlobalHydra.instance().config_loader()
    groups = _Groups(loader, _searched(fixed))
    raise_if_any(override_problems(fixed, groups))
    name = command.config_name
    base = _compose_one(name, _texts(fixed))
    multirun = command.multirun or base.hydra.mode == RunMode.MULTIRUN
    if not multirun:
        raise_if_any(sweep_problems(swept))
        return Composition((_job(name, _texts(fixed), base, "command line"),), None)
    expanded = list(itertools.islice(_expand(base, parsed, loader), MOST_JOBS))
    seen = {text for job in expanded for text in job}
    raise_if_any(_problems_of(seen, groups))
    launcher = base.hydra.launcher
    # ours, or submitit's
    processes = launcher.get("nproc_per_node") or launcher.get("tasks_per_node", 1) * launcher.get("nodes", 1)
    sweep = Sweep(str(base.hydra.sweep.dir), processes, launcher.get("check_first", True))
    told_by = "command line or sweep"
    return Composition(tuple(_job(name, job, _compose_one(name, job), told_by) for job in expanded), sweep)


class _Groups:
    """The groups and options in sight, with the folders of hydra.searchpath given on the command line."""

    def __init__(self, loader: ConfigLoader, searchpath: Sequence[str]) -> None:
        self._loader = loader
        self._overrides = [f"hydra.searchpath=[{','.join(searchpath)}]"] if searchpath else []
        # Hydra copies all it has read for each question
        self._found = cache(self._find)

    def list_groups(self, parent_name: str) -> list[str]:
        return self._found(parent_name, ObjectType.GROUP)

    def get_group_options(self, group_name: str) -> list[str]:
        return self._found(group_name, ObjectType.CONFIG)

    def _find(self, group: str, kind: ObjectType) -> list[str]:
        return sorted(self._loader.get_group_options(group, kind, config_name=None, overrides=self._overrides))


def _searched(overrides: Sequence[Override]) -> list[str]:
    values = [override.value() for override in overrides if override.key_or_group == "hydra.searchpath"]
    return [str(path) for value in values if isinstance(value, list) for path in value]


def _texts(overrides: Sequence[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]


def _problems_of(texts: set[str], groups: _Groups) -> Iterator[ConfigError]:
    parsed, problems = parse_overrides(sorted(texts))
    yield from problems
    yield from override_problems(parsed, groups)


def _expand(base: DictConfig, overrides: Sequence[Override], loader: Any) -> Iterator[tuple[str, ...]]:
    """The overrides of each job, in the order of our sweeper; values drawn by other sweepers are left out."""
    params = base.hydra.sweeper.get("params") or {}
    parser = OverridesParser.create(config_loader=loader)
    given = parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *_texts(overrides)])
    choices: dict[str, list[str]] = {}
    for override in given:
        key = override.get_key_element()
        if override.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        elif not override.is_sweep_override():
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
    rows = named_rows(base.hydra.sweeper.rows, base.hydra.sweeper.only) if "rows" in base.hydra.sweeper else [[]]
    return ((*job, *row) for job in itertools.product(*choices.values()) for row in rows)


def _job(config_name: str, overrides: Sequence[str], composed: DictConfig, told_by: str) -> Job:
    task, provenance = _without_hydra(composed), Provenance(config_name, overrides, told_by)
    try:
        config = to_config(task)
    except ConfigErrors as error:
        raise ConfigErrors(with_file(problem, provenance) for problem in error.problems) from None
    chosen = composed.hydra.runtime.choices.get("team")
    if chosen not in (None, "none", config.team):
        raise ConfigErrors(
            [ConfigError("team", f"{shown_file(f'team/{chosen}')} says {config.team}", f"Write `team: {chosen}` in it")]
        )
    OmegaConf.resolve(task)
    return Job(tuple(overrides), provenance, config, task)


def _without_hydra(composed: DictConfig) -> DictConfig:
    """The configuration without Hydra's own node."""
    task = composed.copy()
    OmegaConf.set_struct(task, False)
    with open_dict(task):
        task.pop("hydra", None)
    return task


def _compose_one(config_name: str, overrides: Sequence[str]) -> DictConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra tells them again when it composes for the run
        warnings.filterwarnings("error", message=".*is not available.*", category=UserWarning)
        try:
            return compose(config_name, list(overrides), return_hydra_config=True)
        except UserWarning as error:
            path = str(error).partition("path=")[2].split(" is not")[0]
            remedy = "Paths are relative to the current folder: file://DIR"
            raise ConfigErrors([ConfigError("hydra.searchpath", f"{path} is not there", remedy)]) from None
        except RecursionError:
            raise ConfigErrors([cycle_problem()]) from None
        except yaml.MarkedYAMLError as error:
            raise ConfigErrors([broken_yaml(error)]) from None
        except (HydraException, ValueError) as error:
            raise ConfigErrors([translated(error, config_name)]) from None
