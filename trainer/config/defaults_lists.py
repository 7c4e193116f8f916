"""What the defaults lists of libraries' files say, where Hydra does not tell what is wrong with them. No torch."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

import yaml

from trainer.config.errors import ConfigError
from trainer.config.search_path import libraries, option_files


def cycle_problem() -> ConfigError:
    """The first cycle among the files of the libraries in sight: Hydra follows one until Python's stack ends."""
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
    """Options that a file's defaults list takes in, as recompute/full."""
    return (option for is_override, option in _entries(folder, file) if not is_override)


def _entries(folder: Path, file: Path) -> Iterator[tuple[bool, str]]:
    """Each option of a file's defaults list, as recompute/full, and whether it overrides another's choice."""
    try:
        content = yaml.safe_load((folder / file).read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return  # it is told when it is chosen
    for entry in (content.get("defaults") or ()) if isinstance(content, dict) else ():
        for name, option in entry.items() if isinstance(entry, dict) else [(str(entry), "")]:
            *words, group = str(name).split()
            if group != "_self_":
                inner = posixpath.join(group.split("@")[0], str(option).split("@")[0]).rstrip("/")
                is_override = "override" in words
                under = "" if inner.startswith("/") or is_override else file.parent.as_posix()
                yield is_override, posixpath.join(under, inner.lstrip("/"))


def file_that_overrides(option: str) -> Path | None:
    """The library's file that chooses this option, as model/acme, by an override in its defaults list."""
    for library in libraries():
        for file in option_files(library.folder):
            if (True, option) in _entries(library.folder, file):
                return library.folder / file
    return None
