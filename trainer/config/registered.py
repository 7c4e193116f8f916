"""Functions that packages register by entry points, for a configuration to name. Imports no torch by itself.

    [project.entry-points."megafit.builders"]
    acme_gated = "acme_megafit.models:build_gated"

Their keyword-only parameters, with their annotations, are the schema of the extras that a configuration passes them:
the group's extras are checked against them as other keys are against ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import ConfigError, ConfigErrors, raise_if_any
from trainer.config.libraries import package_of
from trainer.config.schema import Config
from trainer.config.suggest import choices_text, nearest

#: (model: ModelConfig, config: TransformerConfig, vocab_size, *, extras) -> this pipeline stage's chunks, as
#: models.builder.build_gpt, which it may call with layers of its own
BUILDERS = "megafit.builders"
#: (config: Config, *, extras) -> trainer.run.data.samples.SampleSource
DATA = "megafit.data"


def load(group: str, key: str, name: str) -> Callable[..., Any]:
    """The function of this name. Raises ConfigError about `key` when there is none, or not one that can be used."""
    entries = list(entry_points(group=group))
    found = {entry.value: entry for entry in entries if entry.name == name}
    if not found:
        known = sorted({f"{entry.name} ({package_of(entry)})" for entry in entries})
        near = nearest(name, [entry.name for entry in entries])
        raise ConfigError(
            key,
            f"no installed package registers {name} under {group}",
            (f"Did you mean {near}? " if near else "")
            + (f"Installed: {', '.join(known)}" if known else "None is installed: pip install the team's package"),
        )
    if len(found) > 1:
        packages = " and ".join(package_of(entry) for entry in found.values())
        raise ConfigError(key, f"{packages} both register {name}", "Uninstall one, or give one another name")
    (entry,) = found.values()
    try:
        function = entry.load()
    except Exception as error:  # whatever importing a package can raise
        raise ConfigError(
            key,
            f"{entry.value} of {package_of(entry)} can't be imported: {type(error).__name__}: {error}",
            "Mend that package or its entry point",
        ) from error
    if not inspect.isfunction(function):
        raise ConfigError(key, f"{entry.value} of {package_of(entry)} is no function", "Mend its entry point")
    return function  # type: ignore[no-any-return]


def bound(key: str, function: Callable[..., Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The extras as the function takes them, with the types that it declares.

    Raises ConfigErrors about `key`'s entries that it does not take, lacks, or takes as another type; ConfigError when
    it declares types that can't be found.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    names = [parameter.name for parameter in parameters]
    raise_if_any(
        ConfigError(f"{key}.{name}", f"{function.__name__} takes no {name}", choices_text(name, names))
        for name in extras
        if name not in names
    )
    raise_if_any(
        ConfigError(f"{key}.{p.name}", f"{function.__name__} needs it", f"Add {key}.{p.name}=...")
        for p in parameters
        if p.default is p.empty and p.name not in extras
    )
    try:
        hints = _hints({parameter.name: parameter.annotation for parameter in parameters}, function)
    except NameError as error:
        problem = f"{function.__name__} declares a type that can't be found: {error}"
        raise ConfigError(key, problem, "Import it where the function is, not for type checkers only") from None
    taken: dict[str, Any] = {}
    problems = []
    for name, value in extras.items():
        try:
            taken[name] = _typed(hints.get(name, Any), value)
        except OmegaConfBaseException as error:
            said = str(error).splitlines()[0]
            problems.append(ConfigError(f"{key}.{name}", said, f"{function.__name__} declares {_shown(hints[name])}"))
    raise_if_any(problems)
    return taken


def _hints(annotations: dict[str, Any], function: Any) -> dict[str, Any]:
    """The annotations as types; those of other parameters may name what is only imported for type checkers."""
    told = {name: Any if hint is inspect.Parameter.empty else hint for name, hint in annotations.items()}
    return get_type_hints(type("Extras", (), {"__annotations__": told}), function.__globals__)


def _typed(hint: Any, value: Any) -> Any:
    holder: Any = OmegaConf.structured(make_dataclass("Extra", [("value", hint, field(default=MISSING))]))
    holder.value = value
    extra: Any = OmegaConf.to_object(holder)
    return extra.value


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def problems_of(key: str, group: str, name: str, extras_key: str, extras: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What is wrong with naming this function and passing it these extras."""
    try:
        bound(extras_key, load(group, key, name), extras)
    except ConfigError as error:
        yield error
    except ConfigErrors as errors:
        yield from errors.problems


def model_builder(config: Config) -> Callable[..., Any] | None:
    """The registered builder with its extras bound; None: ours is to build."""
    name = config.model.builder
    if name is None:
        return None
    function = load(BUILDERS, "model.builder", name)
    return partial(function, **bound("model.builder_extras", function, config.model.builder_extras))


def open_registered(config: Config) -> Any:
    """The samples of data.opener, opened."""
    assert config.data.opener is not None
    function = load(DATA, "data.opener", config.data.opener)
    return function(config, **bound("data.extras", function, config.data.extras))
