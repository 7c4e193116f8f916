"""What a step really did, site by site, and whether each option that a user named had an effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memory.plan import Action
from memory.seed import Request


@dataclass(frozen=True)
class Effect:
    """One requested option after the first step. `reason` says why it acted on no layer; empty where it did."""

    action: Action
    name: str
    layers: int
    #: a step, all micro-batches; None where they can't be told
    bytes: int | None
    reason: str


@dataclass
class _Tally:
    bytes: int = 0
    tensors: int = 0


class Census:
    """Bytes by (layer, site or region, action) of one step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._tallies: dict[tuple[int, str, Action], _Tally] = defaultdict(_Tally)
        #: tensors whose site is offloaded but that are under the plan's minimum size
        self._small: dict[str, int] = defaultdict(int)

    def add(self, layer: int, site: str, action: Action, nbytes: int) -> None:
        tally = self._tallies[layer, site, action]
        tally.bytes += nbytes
        tally.tensors += 1

    def add_small(self, site: str) -> None:
        self._small[site] += 1

    def rows(self) -> list[tuple[int, str, Action, int, int]]:
        """(layer, site, action, bytes, tensors), by layer."""
        return [
            (*key, tally.bytes, tally.tensors) for key, tally in sorted(self._tallies.items(), key=lambda i: i[0][:2])
        ]

    def effects(self, requests: Iterable[Request]) -> list[Effect]:
        return [self._effect(request) for request in requests]

    def _effect(self, request: Request) -> Effect:
        hit = {
            key: tally
            for key, tally in self._tallies.items()
            if key[2] is request.action and (key[1] in request.sites or key[1] in request.regions) and tally.bytes
        }
        layers = {layer for layer, _, _ in hit}
        return Effect(
            request.action,
            request.name,
            len(layers),
            sum(tally.bytes for tally in hit.values()),
            "" if layers else request.doubt or self._reason(request),
        )

    def _reason(self, request: Request) -> str:
        small = sum(self._small[site] for site in request.sites)
        if small:
            return f"its {small} tensors are smaller than offload.min_bytes"
        seen = {site for _, site, _ in self._tallies}
        missing = sorted((request.sites | request.regions) - seen)
        return (
            f"no layer of this model saves {', '.join(missing)} here" if missing else "another option acts on it first"
        )
