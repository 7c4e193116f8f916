"""The command line, read by Hydra's rules but with our errors, before Hydra sees it. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NoReturn

from trainer.config.errors import ConfigError
from trainer.config.suggest import is_free_form, nearest, nearest_key


class Purpose(Enum):
    """What a command is for, from the least checked to the most."""

    #: Hydra's own help, version and completion: nothing is composed
    hydra = "hydra"
    #: --help and --info: whatever composes
    inform = "inform"
    #: --cfg: a valid configuration
    show = "show"
    #: the page of memory options
    options = "options"
    train = "train"


#: the one word without a value
OPTIONS_WORD = "options"


@dataclass(frozen=True)
class Command:
    """One parsed command line."""

    overrides: tuple[str, ...]
    config_name: str
    #: folders of team libraries, absolute
    config_dirs: tuple[str, ...]
    multirun: bool
    purpose: Purpose
    #: flags that Hydra is to see, without those read here
    flags: tuple[str, ...]

    def hydra_argv(self, extra_overrides: Sequence[str] = ()) -> list[str]:
        """Arguments for Hydra's own parser, which wants flags before overrides; a later override wins."""
        return [*self.flags, *extra_overrides, *self.overrides]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", message, "`python train.py --hydra-help` lists the flags")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in (
        ("--help", "-h"),
        ("--hydra-help",),
        ("--version",),
        ("--resolve",),
        ("--run", "-r"),
        ("--multirun", "-m"),
        ("--shell-completion", "-sc"),
    ):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument(
        "--info",
        "-i",
        nargs="?",
        const="all",
        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    )
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    return parser


def _flags(parsed: argparse.Namespace) -> list[str]:
    flags = [
        f"--{name}"
        for name in ("help", "hydra-help", "version", "resolve", "run", "multirun", "shell-completion")
        if getattr(parsed, name.replace("-", "_"))
    ]
    for name in ("cfg", "info", "package"):
        if getattr(parsed, name) is not None:
            flags += [f"--{name}", getattr(parsed, name)]
    return [*flags, "--config-name", parsed.config_name]


def _purpose(parsed: argparse.Namespace) -> Purpose:
    if parsed.hydra_help or parsed.version or parsed.shell_completion:
        return Purpose.hydra
    if parsed.help or parsed.info is not None:
        return Purpose.inform
    if OPTIONS_WORD in parsed.overrides:
        return Purpose.options
    return Purpose.train if parsed.cfg is None else Purpose.show


def parse_arguments(argv: Sequence[str]) -> Command:
    """Read argv (without the program's name).

    Differs from Hydra's own parser in three points: --config-dir may be repeated, flags and overrides may be mixed,
    and unknown flags get a suggestion. Raises ConfigError.
    """
    parser = _parser()
    parsed, unknown = parser.parse_known_intermixed_args(list(argv))
    for flag in unknown:
        raise _unknown_flag(flag, parser)
    directories = []
    if parsed.shell_completion:
        parsed.config_dir += _folders_being_typed(os.environ.get("COMP_LINE", ""))
    for directory in parsed.config_dir:
        if not Path(directory).is_dir():
            raise ConfigError(
                "--config-dir", f"there is no folder {directory}", "Give the folder that holds the library's groups"
            )
        directories.append(str(Path(directory).resolve()))
    chosen = [name for name in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(parsed, name)]
    if len(chosen) > 1:
        raise ConfigError("command line", f"--{' and --'.join(chosen)} exclude each other", f"Keep --{chosen[-1]}")
    return Command(
        overrides=tuple(_plainly_spelled(text) for text in parsed.overrides if text != OPTIONS_WORD),
        config_name=parsed.config_name,
        config_dirs=tuple(directories),
        multirun=parsed.multirun,
        purpose=_purpose(parsed),
        flags=tuple(_flags(parsed)),
    )


def _folders_being_typed(line: str) -> list[str]:
    """The folders of --config-dir that a command line which a shell wants completed has so far."""
    typed = re.findall(r"(?:--config-dir|-cd)[ =](\S+)", line)
    return [folder for folder in typed if Path(folder).is_dir()]


def _plainly_spelled(text: str) -> str:
    """+team=NAME means team=NAME; a key below one that takes any, as model.extras, is set whether it is new or not."""
    key = text.partition("=")[0].lstrip("+")
    return f"++{text.lstrip('+')}" if is_free_form(key) else re.sub(r"^\+team=", "team=", text)


def _unknown_flag(flag: str, parser: argparse.ArgumentParser) -> ConfigError:
    name = flag.split("=")[0]
    known = nearest(name, [option for action in parser._actions for option in action.option_strings])
    if known:
        return ConfigError(name, "there is no such flag", f"Did you mean {known}?")
    key = nearest_key(name.strip("-").replace("-", "_")) or nearest_key(
        name.strip("-").replace("-", ".", 1).replace("-", "_")
    )
    remedy = (
        f"Settings are written without dashes: {key}=VALUE" if key else "Settings are written without dashes: key=value"
    )
    return ConfigError(name, "there is no such flag", remedy)
