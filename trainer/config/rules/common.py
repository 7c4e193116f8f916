"""Shapes that many rules have. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.config.suggest import choices_text


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def at_least(config: Config, least: float, *keys: str) -> Iterator[ConfigError]:
    """Values below `least`; unset ones pass."""
    for key in keys:
        value = value_of(config, key)
        if value is not None and not value >= least:
            yield ConfigError(key, f"{value} is too small", f"Write {key}={least:g} or more")


def positive(config: Config, *keys: str) -> Iterator[ConfigError]:
    """Values of zero or less; unset ones pass."""
    for key in keys:
        value = value_of(config, key)
        if value is not None and not value > 0:
            yield ConfigError(key, f"{value} is not above 0", f"Write {key}=... with a number above 0")


def share(config: Config, *keys: str) -> Iterator[ConfigError]:
    """Values outside [0, 1)."""
    for key in keys:
        value = value_of(config, key)
        if not 0 <= value < 1:
            yield ConfigError(key, f"{value} is not in [0, 1)", f"Write {key}=... with a share of one, such as 0.1")


def divides(key: str, value: int, divisor_key: str, divisor: int, why: str) -> Iterator[ConfigError]:
    """`value` of `key` must be a multiple of `divisor`."""
    if value % divisor:
        near = max(1, round(value / divisor)) * divisor
        yield ConfigError(
            key,
            f"{value} is no multiple of {divisor_key}={divisor}: {why}",
            f"Write {key}={near} or change {divisor_key}",
        )


def unused(config: Config, reason: str, remedy: str, *keys: str) -> Iterator[ConfigError]:
    """Keys that were set although nothing reads them here."""
    for key in keys:
        value = value_of(config, key)
        if value is not None and value is not False:
            yield ConfigError(key, f"would do nothing: {reason}", remedy)


def module_names(
    key: str, names: Iterable[str] | None, known: Iterable[str], absent: Mapping[str, str], elsewhere: Iterable[str]
) -> Iterator[ConfigError]:
    """Names that are unknown, or mean nothing on this model, or belong to the other group's list."""
    if names is None:
        return
    names, choices = list(names), list(known)
    if not names:
        yield ConfigError(
            key, "an empty list asks for nothing", f"Name modules, or {key}=null for what pays on this model"
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ConfigError(key, f"{name} is named twice", "Name each module once")
    other = "offload.modules" if key.startswith("recompute") else "recompute.modules"
    for name in dict.fromkeys(names):
        if name in choices:
            continue
        if name in absent:
            yield ConfigError(
                key, f"{name} has nothing to act on: {absent[name]}", f"Drop it. Choices: {', '.join(choices)}"
            )
        elif name in elsewhere:
            yield ConfigError(key, f"{name} is a name of {other}", choices_text(name, choices))
        else:
            yield ConfigError(key, f"there is no module {name}", choices_text(name, choices))
