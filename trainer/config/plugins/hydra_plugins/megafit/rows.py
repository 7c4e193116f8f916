"""hydra/sweeper=rows: the jobs of a sweep as a list of named rows."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override

from trainer.config.rows import named_rows


# annotations must be types, not texts: Hydra runs this module before Python can look it up by name
@dataclass
class RowsSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.megafit.rows.RowsSweeper"
    #: name -> overrides, in the order of running
    rows: Dict[str, List[str]] = field(default_factory=dict)
    #: names of the rows to run; None: all
    only: Optional[List[str]] = None


ConfigStore.instance().store(group="hydra/sweeper", name="rows", node=RowsSweeperConf, provider="megafit")


class RowsSweeper(BasicSweeper):
    """Hydra's basic sweeper with each of its jobs once for each row."""

    def __init__(self, rows: dict[str, list[str]], only: list[str] | None, **basic: Any) -> None:
        super().__init__(**basic)
        self._rows = named_rows(rows, only)

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        return [[[*job, *row] for job in jobs for row in self._rows]]
