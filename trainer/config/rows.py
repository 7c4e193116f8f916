"""Sweeps over a list of named rows, each some overrides of its own, where a product of values won't do. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.config.errors import ConfigError
from trainer.config.suggest import choices_text


def named_rows(rows: Mapping[str, Sequence[str]], only: Sequence[str] | None) -> list[list[str]]:
    """The overrides of each row, its name among them as logger.name, in the order of writing.

    Raises ConfigError when `only` names a row that isn't there.
    """
    for name in only or ():
        if name not in rows:
            raise ConfigError("hydra.sweeper.only", f"there is no row {name}", choices_text(name, list(rows)))
    wanted = rows if only is None else {name: told for name, told in rows.items() if name in only}
    return [[f"logger.name={name}", *told] for name, told in wanted.items()]
