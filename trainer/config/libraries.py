"""Teams' libraries: folders of --config-dir, and packages that name theirs by an entry point. Imports no torch.

A package says in its pyproject.toml where its folder is, as a dotted path from its top level:

    [project.entry-points."megafit.teams"]
    acme = "acme_megafit.conf"

The package is not imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.search_path import CONF, Library, option_files
from trainer.config.suggest import choices_text

TEAMS = "megafit.teams"
#: groups whose options hold keys of all groups, and the line that says so
_GLOBAL_GROUPS = ("cluster", "team", "experiment")
_GLOBAL = "# @package _global_"


def package_of(entry: EntryPoint) -> str:
    """Name and version of the package that has the entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"


def find_libraries(config_dirs: Sequence[str]) -> list[Library]:
    """Every library in sight, each once: those of the command line first.

    Raises ConfigError when an installed package names a folder that isn't there.
    """
    found = [Library(Path(folder)) for folder in config_dirs]
    found += [_installed(entry) for entry in entry_points(group=TEAMS)]
    return list({library.folder: library for library in reversed(found)}.values())[::-1]


def _installed(entry: EntryPoint) -> Library:
    top, *inner = entry.value.split(".")
    spec = find_spec(top)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        folder = Path(place, *inner).resolve()
        if folder.is_dir():
            return Library(folder, f"team {entry.name} ({package_of(entry)})")
    looked = f"{Path(places[0], *inner)} is not there" if places else f"there is no package {top}"
    raise ConfigError(
        f"team {entry.name}",
        f"{package_of(entry)} names {entry.value} as its folder of options: {looked}",
        f"Mend its entry point {TEAMS}, install it anew, or uninstall it",
    )


def library_problems(libraries: Sequence[Library]) -> Iterator[ConfigError]:
    """Files that would never be read: in a folder that is no group, or with the name of one that is found earlier.

    Hydra takes any folder as a group, and the first of two files, without a word.
    """
    for library in libraries:
        yield from _file_problems(library)
    groups = [path.name for path in sorted(CONF.iterdir()) if path.is_dir()]
    seen = {file: CONF for file in option_files(CONF)}
    for library in libraries:
        for group in sorted({file.parts[0] for file in option_files(library.folder) if len(file.parts) > 1}):
            if group not in groups:
                yield ConfigError(
                    library.given_by,
                    f"{library.folder / group}: there is no group {group}",
                    choices_text(group, groups),
                )
        for file in option_files(library.folder):
            if file not in seen:
                seen[file] = library.folder
            elif file.parts[0] == "team":
                yield ConfigError(
                    library.given_by,
                    f"two libraries have a team {file.stem}: {seen[file]} and {library.folder}",
                    "Leave one out, or give one team another name",
                )
            else:
                yield ConfigError(
                    library.given_by,
                    f"{library.folder / file} is hidden by {file.as_posix()} in {seen[file]}",
                    "Give it another name",
                )


def _file_problems(library: Library) -> Iterator[ConfigError]:
    """Files that Hydra would pass over, or read as a group's keys although they hold those of all."""
    for file in sorted(library.folder.glob("*/*.yml")):
        if file.parent.name != "plans":
            yield ConfigError(library.given_by, f"{file} would not be read", f"Name it {file.stem}.yaml")
    for group in _GLOBAL_GROUPS:
        for file in sorted(library.folder.glob(f"{group}/*.yaml")):
            if not file.read_text(encoding="utf-8").startswith(_GLOBAL):
                yield ConfigError(
                    library.given_by, f"{file} holds keys of all groups without saying so", f"Begin it with `{_GLOBAL}`"
                )
