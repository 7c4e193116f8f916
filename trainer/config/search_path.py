"""Where configuration files are looked for beside conf/. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONF = Path(__file__).resolve().parents[2] / "conf"
#: who gave the folders of --config-dir, in Hydra's list of sources
TEAM_PROVIDER = "command-line"
#: Hydra takes launchers and sweepers from packages called hydra_plugins only
_PLUGINS = str(Path(__file__).resolve().parent / "plugins")


@dataclass(frozen=True)
class Library:
    """A folder of options beside conf/, with the same groups in it."""

    folder: Path
    #: who brought it, in Hydra's list of sources
    provider: str = TEAM_PROVIDER

    @property
    def given_by(self) -> str:
        """In errors about it: the flag that named it, or the package that brought it."""
        return "--config-dir" if self.provider == TEAM_PROVIDER else self.provider


_libraries: tuple[Library, ...] = ()


class TeamLibraries(SearchPathPlugin):
    """Adds libraries after ours, so that they add options and can't replace ours unseen.

    A plugin, and not Hydra's own --config-dir, since that takes one folder and is not seen by hydra.compose.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for library in _libraries:
            search_path.append(provider=library.provider, path=f"file://{library.folder}")


def use_plugins() -> None:
    """Let Hydra find our launcher and sweeper, here and in workers that other launchers start.

    To be called before anything else asks Hydra for plugins: it looks for them once.
    """
    if _PLUGINS not in sys.path:
        sys.path.append(_PLUGINS)
        # submitit's workers need our packages too
        paths = (os.environ.get("PYTHONPATH"), _PLUGINS, str(CONF.parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def use_libraries(libraries: Sequence[Library]) -> None:
    """Look into these in every composition of this process from now on."""
    global _libraries
    _libraries = tuple(libraries)
    Plugins.instance().register(TeamLibraries)


def libraries() -> tuple[Library, ...]:
    """Those looked into, in the order of looking."""
    return _libraries


def library_file(name: str) -> Path | None:
    """The file of a library that holds the option, as model/acme; None where it is not a library's."""
    files = (library.folder / f"{name}.yaml" for library in _libraries)
    return next((file for file in files if file.is_file()), None)


def shown_file(name: str) -> str:
    """How to name an option's file: a library's by its path, ours as the repository has it."""
    ours = f"conf/{name}.yaml" if (CONF / f"{name}.yaml").is_file() else f"the schema of {name}"
    return str(library_file(name) or ours)


def option_files(folder: Path) -> Iterator[Path]:
    """The files of a library, below its folder."""
    yield from sorted(file.relative_to(folder) for file in folder.rglob("*.yaml"))
