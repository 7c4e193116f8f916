"""Where configuration files are looked for beside conf/. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from trainer.config.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
#: who gave the folders of --config-dir, in Hydra's list of sources
TEAM_PROVIDER = "command-line"
#: Hydra takes launchers and sweepers from packages called hydra_plugins only
_PLUGINS = str(Path(__file__).resolve().parent / "plugins")

_directories: tuple[str, ...] = ()


class TeamDirectories(SearchPathPlugin):
    """Adds the --config-dir folders after ours, so that they add options and can't replace ours unseen.

    A plugin, and not Hydra's own --config-dir, since that takes one folder and is not seen by hydra.compose.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in _directories:
            search_path.append(provider=TEAM_PROVIDER, path=f"file://{directory}")


def use_plugins() -> None:
    """Let Hydra find our launcher and sweeper, here and in workers that other launchers start.

    To be called before anything else asks Hydra for plugins: it looks for them once.
    """
    if _PLUGINS not in sys.path:
        sys.path.append(_PLUGINS)
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{inherited}{os.pathsep}{_PLUGINS}" if inherited else _PLUGINS


def use_directories(directories: Sequence[str]) -> None:
    """Look into these folders (absolute paths) in every composition of this process from now on."""
    global _directories
    _directories = tuple(directories)
    Plugins.instance().register(TeamDirectories)


def shadowed_problems(directories: Sequence[str]) -> Iterator[ConfigError]:
    """Files that would never be read, since an earlier folder has one of that name: Hydra silently takes the first."""
    seen: dict[str, str] = {}
    for directory in dict.fromkeys(directories):
        for file in sorted(Path(directory).rglob("*.yaml")):
            name = file.relative_to(directory).as_posix()
            if name in seen:
                yield ConfigError("--config-dir", f"{file} is hidden by {name} in {seen[name]}", "Give it another name")
            else:
                seen[name] = directory
