"""Errors that a user can mend by writing something else. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

#: exit code of a command that can't be carried out as it is written
BAD_INPUT = 2


class ConfigError(ValueError):
    """One thing wrong with the configuration: the key it is about, the problem, and what to write instead."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}. {remedy}")
        self.key = key
        self.problem = problem
        self.remedy = remedy


class ConfigErrors(ValueError):
    """All that is wrong with one configuration."""

    def __init__(self, problems: Iterable[ConfigError]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def raise_if_any(problems: Iterable[ConfigError]) -> None:
    """Raise ConfigErrors when there is at least one problem; repeated ones are told once."""
    distinct = {str(problem): problem for problem in problems}
    if distinct:
        raise ConfigErrors(distinct.values())


class RunFailed(RuntimeError):
    """A run ended without being done; its own records say why."""


def print_errors(error: ConfigError | ConfigErrors | RunFailed) -> None:
    """Tell an error on stderr, once however many processes run into it, in red on a terminal."""
    if os.environ.get("RANK", "0") != "0":
        return
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    for line in str(error).splitlines():
        print(f"{red}error: {line}{plain}", file=sys.stderr)
