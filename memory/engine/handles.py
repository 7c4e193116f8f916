"""What stands in for a saved tensor until backward asks for it: kept, offloaded or recomputed.

A handle belongs to one storage (or to one part of it) and lives as long as autograd holds it: dropping the graph
drops the handle, and with it what it holds on either side of the link. Handles hold detached tensors only: one that
held a tensor of the graph would close a cycle through C++ that Python's collector can't see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from memory.engine.itinerary import Itinerary
from memory.engine.ledger import Ledger


class Ticket(Protocol):
    """A tensor's stay in the host tier."""

    def fetch(self) -> torch.Tensor:
        """The tensor on the device again, ready for the current stream."""

    def prefetch(self) -> int:
        """Start the way back; returns the device bytes newly taken (0 if already on its way)."""

    def release(self) -> None:
        """Give the host bytes back."""


@dataclass(frozen=True)
class Geometry:
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    #: in elements
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        return Geometry(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor of this geometry over the storage of `base`."""
        return torch.empty(0, dtype=self.dtype, device=base.device).set_(
            base.untyped_storage(), self.offset, self.size, self.stride
        )


class Handle:
    """One storage's stand-in. `uses` counts the readers still to come; the last one leaves nothing cached."""

    __slots__ = ("__weakref__", "_cached", "_cached_bytes", "_ledger", "uses")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cached: torch.Tensor | None = None
        self._cached_bytes = 0
        self.uses = 0

    def read(self) -> torch.Tensor:
        """A tensor over the whole storage, on the device."""
        base = self._cached
        if base is None:
            base = self._cached = self._make()
            self._take(base.untyped_storage().nbytes() - self._cached_bytes)
        self.uses -= 1
        if self.uses <= 0:
            self._drop()
        return base

    def _make(self) -> torch.Tensor:
        raise NotImplementedError

    def _take(self, nbytes: int) -> None:
        self._cached_bytes += nbytes
        self._ledger.grow(nbytes)

    def _drop(self) -> None:
        self._cached = None
        self._ledger.shrink(self._cached_bytes)
        self._cached_bytes = 0

    def __del__(self) -> None:
        self._ledger.shrink(self._cached_bytes)


class Kept(Handle):
    """Stays on the device. `remade`: saved while a region is re-run in backward, so not kept from forward."""

    __slots__ = ("_nbytes", "_storage", "_tensor", "new_bytes")

    def __init__(self, ledger: Ledger, tensor: torch.Tensor, remade: bool = False) -> None:
        super().__init__(ledger)
        self._tensor = tensor.detach()
        storage = tensor.untyped_storage()
        self._storage, self._nbytes = storage._cdata, storage.nbytes()
        #: 0 where the storage was held already
        self.new_bytes = self._nbytes if ledger.hold(self._storage, self._nbytes) else 0
        if remade:
            ledger.recomputed_bytes += self.new_bytes
        else:
            ledger.kept_bytes += self.new_bytes

    def read(self) -> torch.Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._ledger.let_go(self._storage, self._nbytes)


class Offloaded(Handle):
    """Lies in host memory between forward and backward."""

    __slots__ = ("_itinerary", "_place", "_ticket")

    def __init__(self, ledger: Ledger, ticket: Ticket, nbytes: int, itinerary: Itinerary) -> None:
        super().__init__(ledger)
        self._ticket, self._itinerary = ticket, itinerary
        self._place = itinerary.add(self, nbytes)
        ledger.offloaded_bytes += nbytes

    def prefetch(self) -> None:
        self._take(self._ticket.prefetch())

    def _make(self) -> torch.Tensor:
        device = self._ticket.fetch()
        self._itinerary.read(self._place)
        return device

    def __del__(self) -> None:
        super().__del__()
        self._ticket.release()


class Recomputed(Handle):
    """Made again from another saved tensor, which may itself be kept, offloaded or recomputed."""

    __slots__ = ("_geometry", "_produce", "_source")

    def __init__(
        self, ledger: Ledger, produce: Callable[[torch.Tensor], torch.Tensor], source: Saved, geometry: Geometry
    ) -> None:
        super().__init__(ledger)
        self._produce, self._source, self._geometry = produce, source, geometry

    def _make(self) -> torch.Tensor:
        with torch.no_grad():
            made = self._produce(self._source.unpack())
        if Geometry.of(made) != self._geometry:
            raise RuntimeError(
                f"a recomputed tensor came out as {Geometry.of(made)}, where {self._geometry} was saved: "
                "its module does not repeat itself; keep this site (plan.source=file)"
            )
        self._ledger.recomputed_bytes += made.untyped_storage().nbytes()
        return made


class Saved:
    """What autograd holds: a handle and where in its storage the saved tensor lies."""

    __slots__ = ("_geometry", "_handle")

    def __init__(self, handle: Handle | None, geometry: Geometry | None) -> None:
        self._handle, self._geometry = handle, geometry
        if handle:
            handle.uses += 1

    def bind(self, other: Saved) -> None:
        """Stand for what `other` stands for: for a tensor whose site was not yet known when it was saved."""
        self._handle, self._geometry = other._handle, other._geometry

    def unpack(self) -> torch.Tensor:
        assert self._handle, "a tensor saved for backward was never given a handle"
        base = self._handle.read()
        return base if self._geometry is None else self._geometry.over(base)
