"""Checks of the words on the command line, one by one, before anything is composed. Imports no torch.

Hydra stops at the first bad override and says, for instance, to append an unknown key by +, which it then takes
silently. Here every override is checked, all problems are told, and each with the word that was probably meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, get_origin

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainer.config.errors import ConfigError
from trainer.config.suggest import (
    choices_text,
    is_free_form,
    leaf_types,
    nearest,
    nearest_key,
    nearest_key_text,
    sections,
    unwrapped,
)
from trainer.config.values import type_problem

#: groups of which conf/config.yaml chooses no option
_UNCHOSEN = ("cluster", "team", "experiment")


class Groups(Protocol):
    """What Hydra's config loader knows of groups."""

    def list_groups(self, parent_name: str) -> list[str]: ...

    def get_group_options(self, group_name: str) -> list[str]: ...


def quoted(text: object) -> str:
    """A text as a value that Hydra reads as this text, whatever signs it has."""
    return "'" + str(text).replace("'", "\\'") + "'"


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[ConfigError]]:
    """Parse each override; what can't be parsed becomes a problem."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for text in texts:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException:
            problems.append(_syntax_problem(text))
    return parsed, problems


def sweep_problems(overrides: Sequence[Override]) -> Iterator[ConfigError]:
    """Overrides that list several values although this is no sweep."""
    for override in overrides:
        if override.is_sweep_override():
            key, text = override.key_or_group, _value_text(override)
            if key in leaf_types() and get_origin(unwrapped(leaf_types()[key])) is list:
                yield ConfigError(key, f"{text} is not a list", f"Write '{key}=[{text}]', with the quotes")
            else:
                yield ConfigError(key, f"{text} means one run for each value", "Add -m to sweep, or give one value")


def override_problems(overrides: Sequence[Override], groups: Groups) -> Iterator[ConfigError]:
    """What is wrong with single-valued overrides: unknown keys, groups and options, values of the wrong type."""
    for override in overrides:
        key = override.key_or_group
        if override.is_delete():
            yield ConfigError(key, "nothing can be deleted", f"Choose another option or value: {key}=...")
        elif key.startswith("hydra."):
            yield from _hydra_problem(key)
        elif _is_group(key, groups):
            yield from _option_problem(override, groups)
        elif "/" in key:
            yield _unknown_group(key, groups)
        else:
            yield from _value_problem(override, groups)


def _value_text(override: Override) -> str:
    """The value as it was typed."""
    return str(override.input_line).partition("=")[2]


def _syntax_problem(text: str) -> ConfigError:
    key, equals, value = text.partition("=")
    name = key.lstrip("+~") or text
    if not equals:
        if any(mark in text for mark in "[]{}"):
            return ConfigError(
                name, "is a piece of a list", "Write lists in quotes and without spaces, 'key=[first,second]'"
            )
        key_like = nearest_key(name.split()[0]) if name.split() else None
        return ConfigError(name, "has no value", f"Write {key_like or 'key'}=VALUE")
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            missing = closing if value.count(opening) > value.count(closing) else opening
            whole = value + closing if missing == closing else opening + value
            return ConfigError(name, f"{value} lacks a {missing}", f"Write '{key}={whole}', with the quotes")
    for quote in "'\"":
        if value.count(quote) % 2:
            return ConfigError(name, f"{value} lacks a closing {quote}", f"Write {key}=... with both quotes")
    return ConfigError(
        name, f"{text} can't be read", f"Put values with special signs into two pairs of quotes: \"{key}='...'\""
    )


def _hydra_problem(key: str) -> Iterator[ConfigError]:
    """Keys that Hydra's own node lacks; its dictionaries and other plugins' settings take any."""
    node: Any = OmegaConf.structured(HydraConf)
    path = "hydra"
    for name in key.split(".")[1:]:
        if not isinstance(node, DictConfig) or OmegaConf.get_type(node) is dict:
            return
        if name not in [str(known) for known in node]:
            near = nearest(name, [str(known) for known in node])
            remedy = f"Did you mean {path}.{near}?" if near else "`python train.py --cfg hydra` prints Hydra's keys"
            yield ConfigError(key, f"Hydra has no such key in {path}", remedy)
            return
        path, node = f"{path}.{name}", node._get_node(name)


def _is_group(key: str, groups: Groups) -> bool:
    """A folder without options, as conf/plans, is none."""
    key = key.split("@")[0]
    parent, _, name = key.rpartition("/")
    return name in groups.list_groups(parent) and bool(groups.get_group_options(key))


def _all_groups(groups: Groups) -> list[str]:
    return [name for name in groups.list_groups("") if groups.get_group_options(name)]


def _unknown_group(key: str, groups: Groups) -> ConfigError:
    parent, _, name = key.rpartition("/")
    siblings = [f"{parent}/{group}" for group in groups.list_groups(parent)] or _all_groups(groups)
    if parent in sections() and f"{parent}.{name}" in leaf_types():
        return ConfigError(key, "there is no such group", f"For a single value write {parent}.{name}=VALUE")
    return ConfigError(key, "there is no such group", choices_text(key, siblings))


def _option_problem(override: Override, groups: Groups) -> Iterator[ConfigError]:
    group, value = override.key_or_group.split("@")[0], override.value()
    options = groups.get_group_options(group)
    if value is None and group in _UNCHOSEN:
        return
    if isinstance(value, list):
        yield ConfigError(
            group,
            "takes one option, not a list",
            f"Write {group}={value[0] if value else options[0]}; to sweep, -m {group}=A,B",
        )
    elif str(value) not in options:
        yield _unknown_option(group, value, options)
    elif override.is_add() and not group.startswith("hydra/"):
        yield ConfigError(
            group, "this group is already chosen, so + adds a second option", f"Write {group}={value}, without the +"
        )


def _unknown_option(group: str, option: object, options: Sequence[str]) -> ConfigError:
    if isinstance(option, dict):
        return ConfigError(
            group, "is a group: it takes the name of an option", f"For single values write {group}.KEY=VALUE"
        )
    if group == "team" and list(options) == ["none"]:
        return ConfigError(
            f"{group}={option}",
            "no team library is in sight",
            f"Name its folder: --config-dir FOLDER {group}={option}, or install its package",
        )
    return ConfigError(f"{group}={option}", f"{group} has no such option", choices_text(str(option), options))


def _value_problem(override: Override, groups: Groups) -> Iterator[ConfigError]:
    key, value = override.key_or_group, override.value()
    if is_free_form(key):
        if not (override.is_add() or override.is_force_add()):
            yield ConfigError(key, "a further field has to be added", f"Write +{key}={_value_text(override)}")
    elif key in leaf_types():
        if get_origin(leaf_types()[key]) is dict and isinstance(value, dict):
            if value and not (override.is_add() or override.is_force_add()):
                yield ConfigError(key, "further fields have to be added", f"Write '+{key}={_value_text(override)}'")
            return
        problem = type_problem(key, value)
        if problem:
            yield problem
    elif key in sections():
        inside = [leaf.split(".", 1)[1] for leaf in leaf_types() if leaf.startswith(f"{key}.")]
        if not isinstance(value, dict):
            yield ConfigError(key, "is a section, not a value", f"Write {key}.KEY=VALUE; keys: {', '.join(inside)}")
    else:
        yield ConfigError(key, "there is no such key", _remedy_for_unknown(key, groups))


def _remedy_for_unknown(key: str, groups: Groups) -> str:
    section, _, last = key.rpartition(".")
    if _is_group(section, groups) and last in groups.get_group_options(section):
        return f"To choose that option write {section}={last}"
    if "." in key and section in leaf_types():
        return f"{section} is a single value: write {section}=VALUE"
    group = nearest(key, _all_groups(groups))
    if group and group != nearest_key(key) and "." not in key:
        return f"Did you mean {group}=OPTION? Options: {', '.join(groups.get_group_options(group))}"
    return nearest_key_text(key)
