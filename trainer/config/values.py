"""Whether a value fits its key, and in which words to say that it does not. Imports no torch."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import ConfigError
from trainer.config.root import structured_schema
from trainer.config.suggest import choices_text, leaf_types, unwrapped


def type_problem(key: str, value: Any) -> ConfigError | None:
    """What is wrong with giving this value to a key of the schema; None if it fits.

    Interpolations are let through: what they stand for is checked once they are resolved.
    """
    hint = leaf_types()[key]
    inner = unwrapped(hint)
    if (isinstance(value, str) and "${" in value) or value == "???":
        return None
    if value is None:
        return (
            None
            if inner is not hint or hint is Any
            else ConfigError(key, "null is no value for it", _expected(key, inner))
        )
    # a float field takes true as 1.0 in OmegaConf; nobody means that
    if isinstance(value, bool) and inner in (int, float):
        return ConfigError(key, f"{_shown(value)} is no {_kind(inner)}", _expected(key, inner))
    if isinstance(inner, type) and issubclass(inner, Enum):
        names = [member.name for member in inner]
        if isinstance(value, inner) or value in names:
            return None
        return ConfigError(key, f"{_shown(value)} is none of its values", choices_text(str(value), names))
    if get_origin(inner) is list and isinstance(value, str):
        return ConfigError(key, f"{value} is not a list", f"Write '{key}=[{value}]', with the quotes")
    try:
        OmegaConf.update(_scratch(), key, value, merge=False)
    except OmegaConfBaseException:
        return ConfigError(key, f"{_shown(value)} is no {_kind(inner)}", _expected(key, inner))
    return None


@cache
def _scratch() -> DictConfig:
    """A schema node to try values on: building one takes tens of milliseconds."""
    return structured_schema()


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _kind(hint: Any) -> str:
    if get_origin(hint) in (list, dict):
        return "list" if get_origin(hint) is list else "dictionary"
    return {int: "whole number", float: "number", bool: "truth value", str: "text"}.get(hint, "value of its type")


def _expected(key: str, hint: Any) -> str:
    if get_origin(hint) is list:
        return f"Write a list in quotes, '{key}=[first,second]'"
    if get_origin(hint) is dict:
        return f"Write +{key}.NAME=VALUE"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return choices_text("", [member.name for member in hint])
    return {
        int: f"Write a whole number, {key}=4",
        float: f"Write a number, {key}=0.1",
        bool: f"Write {key}=true or {key}=false",
        str: f"Write a text, {key}=name",
    }.get(hint, "See `python train.py --cfg job`")
