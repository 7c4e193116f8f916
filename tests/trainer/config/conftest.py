from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import OmegaConf

from trainer.config.machine import Machine
from trainer.config.root import structured_schema
from trainer.config.schema import Config

ConfigOf = Callable[..., Config]


@pytest.fixture
def cpu() -> Machine:
    return Machine(world_size=None, has_cuda=False, te_version=None, environment={})


@pytest.fixture
def gpu() -> Machine:
    return Machine(world_size=None, has_cuda=True, te_version=(2, 11), environment={"NVTE_CPU_OFFLOAD_V1": "1"})


@pytest.fixture
def config_of() -> ConfigOf:
    """The schema's defaults with the given key=value settings; values are YAML."""

    def build(*settings: str) -> Config:
        config = OmegaConf.to_object(OmegaConf.merge(structured_schema(), OmegaConf.from_dotlist(list(settings))))
        assert isinstance(config, Config)
        return config

    return build
