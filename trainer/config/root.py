"""The schema as an OmegaConf node, and its registration with Hydra. Imports no torch."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from trainer.config.schema import Config


def structured_schema() -> DictConfig:
    """The schema as a node that can be filled: OmegaConf marks the nodes of frozen dataclasses read-only."""
    schema: DictConfig = OmegaConf.structured(Config)
    _thaw(schema)
    return schema


def register_schema() -> None:
    """Make the schema known as root_schema, the first of the defaults in conf/config.yaml.

    With it composition itself refuses unknown keys in a group's file, and names the file.
    """
    ConfigStore.instance().store(name="root_schema", node=structured_schema(), provider="megafit")


def _thaw(node: DictConfig) -> None:
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _thaw(child)
