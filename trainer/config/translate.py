"""Hydra's and YAML's errors of composition in our words. Imports no torch."""

from __future__ import annotations

import re

import yaml
from hydra.errors import MissingConfigException

from trainer.config.defaults_lists import file_that_overrides
from trainer.config.errors import ConfigError
from trainer.config.search_path import CONF, shown_file
from trainer.config.suggest import choices_text, nearest_key_text


def broken_yaml(error: yaml.MarkedYAMLError) -> ConfigError:
    """Where in which file YAML breaks."""
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark else "a configuration file"
    return ConfigError(
        where, f"not YAML: {error.problem or error.context}", "Check brackets, quotes and indentation there"
    )


def translated(error: Exception, config_name: str) -> ConfigError:
    """The file, the key and the nearest right name, dug out of one of Hydra's errors."""
    text = f"{error}\n{error.__cause__ or ''}"
    file = re.search(r"In '([^']+)'", text)
    where = f" (in {shown_file(file.group(1))})" if file and file.group(1) != "config" else ""
    if isinstance(error, MissingConfigException):
        return _missing_file(error, text, where, config_name)
    unmatched = re.search(r"Could not override '([^']+)'\.\s+No match in the defaults list", text)
    if unmatched:
        groups = sorted(path.name for path in CONF.iterdir() if path.is_dir())
        group = unmatched.group(1)
        return ConfigError(f"override /{group}", f"no such group is chosen{where}", choices_text(group, groups))
    full_key = re.search(r"full_key: *(\S+)", text)
    key = full_key.group(1) if full_key else (file.group(1) if file else "hydra")
    if re.search(r"Key '[^']*' (not in|is not in struct)", text):
        return ConfigError(key, f"there is no such key{where}", nearest_key_text(key))
    said = re.search(r"(Value '.*|Invalid value .*|Invalid type .*|Merge error: .*|field '.*)", text)
    reason = said.group(1) if said else text.strip().splitlines()[0]
    choices = re.search(r"Invalid value '([^']*)', expected one of \[([^]]*)\]", text)
    if choices:
        return ConfigError(
            key,
            f"{choices.group(1)} is none of its values{where}",
            choices_text(choices.group(1), choices.group(2).split(", ")),
        )
    return ConfigError(
        key,
        f"{reason}{where}",
        "Correct the value there" if where else "`python train.py --help` shows how to write it",
    )


def _missing_file(error: MissingConfigException, text: str, where: str, config_name: str) -> ConfigError:
    missing = re.search(r"Could not (?:find|load) '([^']+)'", text)
    if not missing:
        near = [path.stem for path in CONF.glob("*.yaml")]
        return ConfigError(
            "--config-name", f"there is no {config_name}.yaml in the search path", choices_text(config_name, near)
        )
    name = missing.group(1).rstrip(".")
    chosen_in = None if where else file_that_overrides(name)
    if chosen_in:
        where = f" (in {chosen_in})"
    options = error.options or [path.stem for path in (CONF / name).parent.glob("*.yaml")]
    return ConfigError(name, f"there is no such option{where}", choices_text(name.rpartition("/")[2], sorted(options)))
