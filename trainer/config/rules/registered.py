"""Rules of what packages register: model builders and data sources. Imports a package only if it is named."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.errors import ConfigError
from trainer.config.machine import Machine
from trainer.config.registered import BUILDERS, DATA, problems_of
from trainer.config.schema import Config, DataSource, Engine


def problems(config: Config, machine: Machine) -> Iterator[ConfigError]:
    yield from _builder(config)
    yield from _opener(config)


def _builder(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if model.builder is None:
        if model.builder_extras:
            yield ConfigError(
                "model.builder_extras", "would do nothing: the model is built by ours", "Add model.builder=NAME"
            )
        return
    if config.engine.name is Engine.megatron:
        yield ConfigError(
            "model.builder", "engine=megatron builds Megatron's stock layers", "Write engine=stash or drop it"
        )
    yield from problems_of("model.builder", BUILDERS, model.builder, "model.builder_extras", model.builder_extras)


def _opener(config: Config) -> Iterator[ConfigError]:
    data = config.data
    if data.source is not DataSource.registered:
        for key, is_set in (("data.opener", data.opener is not None), ("data.extras", bool(data.extras))):
            if is_set:
                yield ConfigError(
                    key, f"would do nothing: the source is {data.source.name}", "Add data.source=registered or drop it"
                )
    elif data.opener is None:
        yield ConfigError("data.opener", "data.source=registered needs one", "Add data.opener=NAME")
    else:
        yield from problems_of("data.opener", DATA, data.opener, "data.extras", data.extras)
