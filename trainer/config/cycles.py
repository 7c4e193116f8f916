"""Defaults lists that lead back to themselves, which Hydra follows until Python's stack ends. Imports no torch."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

import yaml

from trainer.config.errors import ConfigError
from trainer.config.search_path import libraries, option_files


def cycle_problem() -> ConfigError:
    """The first cycle among the files of the libraries in sight."""
    folders = [library.folder for library in libraries()]
    uses = {
        file.with_suffix("").as_posix(): list(_uses(folder, file))
        for folder in folders
        for file in option_files(folder)
    }
    for start in uses:
        path = _path_back(start, start, uses, frozenset())
        if path:
            return ConfigError(
                f"{path[0]}.yaml",
                f"its defaults list leads back to itself: {' -> '.join(path)}",
                f"Take one of these out of the defaults lists in {', '.join(map(str, folders))}",
            )
    return ConfigError("defaults", "a defaults list leads back to itself", "Look through the files chosen")


def _path_back(name: str, goal: str, uses: dict[str, list[str]], seen: frozenset[str]) -> list[str]:
    """The steps from name to goal, both in it; empty if there are none."""
    for used in uses.get(name, ()):
        if used == goal:
            return [name, goal]
        rest = _path_back(used, goal, uses, seen | {used}) if used not in seen else []
        if rest:
            return [name, *rest]
    return []


def _uses(folder: Path, file: Path) -> Iterator[str]:
    """Options that a file's defaults list takes in, as recompute/full; overrides take nothing in."""
    group = file.parent.as_posix()
    content = yaml.safe_load((folder / file).read_text(encoding="utf-8"))
    entries = content.get("defaults", []) if isinstance(content, dict) else []
    for entry in entries or []:
        for name, option in entry.items() if isinstance(entry, dict) else [(str(entry), "")]:
            if not str(name).startswith("override ") and name != "_self_":
                inner = posixpath.join(str(name).split("@")[0], str(option).split("@")[0]).rstrip("/")
                yield inner.lstrip("/") if inner.startswith("/") else posixpath.join(group, inner)
