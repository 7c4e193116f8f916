"""One row of numbers from every rank, on every rank."""

from __future__ import annotations

import dataclasses
import math
from typing import get_type_hints

import torch
import torch.distributed as dist

from trainer.report.observer import RankUse

_HINTS = get_type_hints(RankUse)


def gather(own: RankUse) -> list[RankUse]:
    """By rank. Collective: one exchange of a dozen numbers."""
    if dist.get_world_size() == 1:
        return [own]
    values = pack(own)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [torch.empty(len(values), dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(values, dtype=torch.float64, device=device))
    return [unpack(row.tolist()) for row in rows]


def pack(row: RankUse) -> list[float]:
    """As doubles, which hold bytes up to 2^53 exactly; what is not known as NaN."""
    return [math.nan if value is None else float(value) for value in dataclasses.astuple(row)]


def unpack(values: list[float]) -> RankUse:
    fields: dict[str, float | int | None] = {}
    for (name, hint), value in zip(_HINTS.items(), values, strict=True):
        fields[name] = None if math.isnan(value) else value if hint is float else int(value)
    return RankUse(**fields)  # type: ignore[arg-type]
