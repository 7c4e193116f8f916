"""From a composed configuration to a checked value: nothing unknown, missing or of a wrong type. Imports no torch.

Composition alone lets through what was appended by + (Hydra) and what only shows on reading: missing values and
interpolations that lead nowhere. Hence the second merge over the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trainer.config.errors import ConfigError, raise_if_any
from trainer.config.root import structured_schema
from trainer.config.schema import Config
from trainer.config.suggest import is_free_form, leaf_types, nearest_key_text, sections
from trainer.config.values import type_problem


def to_config(composed: DictConfig) -> Config:
    """Check and convert a composed configuration (without its hydra node).

    Raises ConfigErrors with everything wrong in it.
    """
    raise_if_any(_unknown_keys(composed))
    raise_if_any(_unreadable(composed, ""))
    plain: Any = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    raise_if_any(_wrong_types(plain))
    config = OmegaConf.to_object(OmegaConf.merge(structured_schema(), plain))
    assert isinstance(config, Config)
    return config


def _unknown_keys(composed: DictConfig) -> Iterator[ConfigError]:
    for top in map(str, composed):
        node = composed._get_node(top)
        inner = (
            [f"{top}.{key}" for key in map(str, node)] if top in sections() and isinstance(node, DictConfig) else [top]
        )
        for key in inner:
            if key not in leaf_types() and key not in sections() and not is_free_form(key):
                yield ConfigError(key, "there is no such key", nearest_key_text(key))


def _unreadable(node: Any, prefix: str) -> Iterator[ConfigError]:
    """Leaves that are missing or whose interpolation fails, found one by one so that each can be named."""
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for name in keys:
        key = f"{prefix}.{name}" if prefix else str(name)
        try:
            value = node[name]
        except MissingMandatoryValue:
            yield ConfigError(key, "needs a value here", f"Add {key}=...")
        except OmegaConfBaseException as error:
            raw = node._get_node(name)._value()
            reason = str(error).splitlines()[0]
            yield ConfigError(key, f"{raw} can't be worked out: {reason}", "Check the name inside ${...}")
        else:
            if isinstance(value, (DictConfig, ListConfig)):
                yield from _unreadable(value, key)


def _wrong_types(plain: dict[str, Any]) -> Iterator[ConfigError]:
    for key in leaf_types():
        section, _, name = key.rpartition(".")
        values = plain.get(section) if section else plain
        if isinstance(values, dict) and name in values:
            problem = type_problem(key, values[name])
            if problem:
                yield problem
    for section in sections():
        if not isinstance(plain.get(section), dict):
            yield ConfigError(section, "is missing", f"Choose an option: {section}=...")
