"""Who set a value: every file and word that has it, the weakest first, so that the last one is what counts.

The order: the schema's defaults, the groups' files, then cluster, team and experiment, then the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from trainer.config.errors import ConfigError
from trainer.config.overrides import parse_overrides
from trainer.config.search_path import CONF, library_file, shown_file
from trainer.config.suggest import is_free_form, leaf_types, nearest_key_text, sections

_ABSENT = object()


@dataclass(frozen=True)
class Setting:
    """One place that gives a key a value."""

    #: an option's name, as model/tiny, or the word of the command line
    source: str
    value: Any
    #: command line, or sweep; empty: a file or the schema has it
    told_by: str = ""

    @property
    def where(self) -> str:
        if self.told_by:
            return f"{self.told_by}: {self.source}"
        return "our default, in the schema" if self.source == "root_schema" else shown_file(self.source)


@dataclass(frozen=True)
class _File:
    #: an option, as model/tiny
    name: str
    #: where its content stands
    package: Sequence[str]
    content: Any
    #: the options of other groups that it chooses
    chosen: Mapping[str, Any]


class Provenance:
    """Of one job: its primary configuration and all the words it was told."""

    def __init__(self, config_name: str, overrides: Sequence[str], told_by: str) -> None:
        self._config_name = config_name
        self._told_by = told_by
        self._overrides = list(overrides)

    def settings(self, key: str) -> list[Setting]:
        """Everything that sets this key, a leaf as model.num_layers; the last one wins."""
        path = key.split(".")
        found = [
            Setting(file.name, value)
            for file in self._files
            if (value := _value_at(file.content, file.package, path)) is not _ABSENT
        ]
        told = [
            (override, _value_at(override.value(), override.key_or_group.split("."), path)) for override in self._told
        ]
        return found + [
            Setting(str(override.input_line), override.value() if value is _ABSENT else value, self._told_by)
            for override, value in told
            if value is not _ABSENT or override.key_or_group.startswith(f"{key}.")
        ]

    def choices(self, group: str) -> list[Setting]:
        """Everything that chooses this group's option; the last one wins."""
        found = [Setting(file.name, file.chosen[group]) for file in self._files if group in file.chosen]
        return found + [
            Setting(str(override.input_line), override.value(), self._told_by)
            for override in self._told
            if override.key_or_group == group
        ]

    @cached_property
    def _told(self) -> list[Override]:
        parsed, _ = parse_overrides(self._overrides)
        return parsed

    @cached_property
    def _files(self) -> list[_File]:
        """As composition merges them."""
        initialised = GlobalHydra.instance().is_initialized()
        with nullcontext() if initialised else initialize_config_dir(str(CONF), "train", version_base="1.3"):
            loader: Any = GlobalHydra.instance().config_loader()
            merged = loader.compute_defaults_list(self._config_name, self._overrides, RunMode.RUN).defaults
            names = [(default.config_path, default.package or "") for default in merged if default.config_path]
            loaded = [(name, package, loader.repository.load_config(name)) for name, package in names]
        return [
            _File(
                name,
                [part for part in package.split(".") if part],
                OmegaConf.to_container(file.config, resolve=False, enum_to_str=True),
                {d.group.lstrip("/"): d.value for d in file.defaults_list or () if getattr(d, "value", None)},
            )
            for name, package, file in loaded
            if file is not None
        ]


def _value_at(content: Any, package: Sequence[str], path: Sequence[str]) -> Any:
    """What `content`, which stands at `package`, has at `path`."""
    if list(path[: len(package)]) != list(package):
        return _ABSENT
    for name in path[len(package) :]:
        if not isinstance(content, Mapping) or name not in content:
            return _ABSENT
        content = content[name]
    return content


def with_file(problem: ConfigError, provenance: Provenance) -> ConfigError:
    """The problem with the library's file that set the key; as it is where a file of ours or the command line did."""
    settings = provenance.settings(problem.key) or provenance.choices(problem.key)
    last = settings[-1] if settings else None
    file = None if last is None or last.told_by else library_file(last.source)
    if file is None or str(file) in problem.problem:
        return problem
    return ConfigError(problem.key, f"{problem.problem} (set in {file})", problem.remedy)


def explained(key: str, provenance: Provenance) -> Iterator[str]:
    """Lines that tell who set a key, or all keys of a section; weakest first.

    Raises ConfigError when there is no such key.
    """
    if key in leaf_types() or is_free_form(key) or key.startswith("hydra."):
        leaves = [key]
    elif key in sections():
        leaves = [leaf for leaf in leaf_types() if leaf.startswith(f"{key}.")]
    elif provenance.choices(key):
        leaves = []
    else:
        raise ConfigError("explain", f"there is no key {key}", nearest_key_text(key))
    group = key.split(".")[0]
    for heading, settings in [
        (f"group {group}", provenance.choices(group)),
        *((leaf, provenance.settings(leaf)) for leaf in leaves),
    ]:
        if settings:
            yield f"{heading} = {_shown(settings[-1].value)}"
            width = max(len(_shown(setting.value)) for setting in settings)
            yield from (f"    {_shown(setting.value):{width}}  {setting.where}" for setting in settings)


def _shown(value: Any) -> str:
    return (
        OmegaConf.to_yaml(value).strip().replace("\n", ", ")
        if isinstance(value, (dict, list))
        else (
            {None: "null", True: "true", False: "false"}[value]
            if value is None or isinstance(value, bool)
            else str(value)
        )
    )
