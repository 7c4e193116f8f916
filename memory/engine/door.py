"""The stash's door: all that a wrapped layer saves for backward goes out and comes back here.

Identity is the storage, held by weak reference while the layer runs forward: an address alone comes back as another
tensor once its storage is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memory.engine.census import Census
from memory.engine.handles import Geometry, Kept, Offloaded, Recomputed, Saved
from memory.engine.host import HostTier
from memory.engine.itinerary import Itinerary
from memory.engine.ledger import Ledger
from memory.plan import Action, LayerPlan

Produce = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Books:
    """What all doors of an engine share."""

    ledger: Ledger
    census: Census
    tier: HostTier
    min_offload_bytes: int
    device_type: str
    #: storages of parameters: saved by reference, no bytes of their own
    parameters: Collection[int] = ()


@dataclass
class _Name:
    site: str
    geometry: Geometry
    #: how to make it again, and from what; None where it is not to be recomputed
    produce: Produce | None = None
    source: Saved | None = None
    handle: Recomputed | None = None
    #: autograd has saved this very tensor
    saved: bool = False


@dataclass
class _Entry:
    """What is known of one storage while its layer runs."""

    #: keeps the storage's identity from being given to another
    ref: StorageWeakRef
    #: by (offset, number of elements): views of one buffer can be different sites
    names: dict[tuple[int, int], _Name] = field(default_factory=dict)
    kept: Kept | None = None
    copies: dict[Geometry | None, Offloaded] = field(default_factory=dict)
    #: lives outside the layer anyway (masks, rotary tables): never worth an action
    shared: bool = False


class CountingDoor:
    """Keeps and counts: for what lies outside the layers, and (remade) for what regions re-make in backward."""

    def __init__(
        self,
        books: Books,
        on_save: Callable[[int], None],
        on_read: Callable[[], None] = lambda: None,
        remade: bool = False,
    ) -> None:
        self._books, self._on_save, self._on_read, self._remade = books, on_save, on_read, remade

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        if not _counts(tensor, self._books):
            return tensor
        kept = Kept(self._books.ledger, tensor, self._remade)
        self._on_save(kept.new_bytes)
        return Saved(kept, Geometry.of(tensor))

    def unpack(self, saved: Saved | torch.Tensor) -> torch.Tensor:
        self._on_read()
        return _unpack(saved)


class LayerDoor:
    """One forward pass of one layer for one micro-batch."""

    def __init__(
        self, books: Books, layer: int, plan: LayerPlan, itinerary: Itinerary, default_site: str = "rest"
    ) -> None:
        self._books, self._layer, self._plan, self._itinerary = books, layer, plan, itinerary
        self._stop = itinerary.enter_layer()
        self._entries: dict[int, _Entry] = {}
        #: the site of tensors that nothing has named
        self._default_site = default_site
        #: saved inside the attention core, before it is known which of them is its output
        self._pending: list[tuple[Saved, torch.Tensor]] | None = None
        self._core_inputs: list[tuple[_Name, torch.Size]] = []

    def name(
        self, tensor: torch.Tensor, site: str, produce: Produce | None = None, source: torch.Tensor | None = None
    ) -> _Name:
        """This tensor is that site's; produce(source) makes it again."""
        name = _Name(site, Geometry.of(tensor))
        if produce and source is not None and self._plan.action(site) is Action.recompute:
            packed = self.pack(source)
            if isinstance(packed, Saved):
                name.produce, name.source = produce, packed
        return self._entry(tensor).names.setdefault((int(tensor.storage_offset()), tensor.numel()), name)

    def share(self, tensor: torch.Tensor) -> None:
        """This tensor outlives the layer whatever the layer does."""
        self._entry(tensor).shared = True

    def enter_core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """The attention core begins."""
        inputs = {"query": query, "key": key, "value": value}
        self._core_inputs = [(self.name(tensor, site), tensor.size()) for site, tensor in inputs.items()]
        self._default_site, self._pending = "attn_scores", []

    def leave_core(self, output: torch.Tensor) -> None:
        """The attention core has returned this: what it saved can be told apart now."""
        self.name(output, "core_attn_out")
        pending, self._pending = self._pending or [], None
        for saved, tensor in pending:
            if _find(self._entry(tensor), tensor) is None:
                self._name_copy(tensor)
            packed = self.pack(tensor)
            assert isinstance(packed, Saved)
            saved.bind(packed)
        self._core_inputs, self._default_site = [], "rest"

    def _name_copy(self, tensor: torch.Tensor) -> None:
        """Attention may save a contiguous copy of an input instead of the input (Transformer Engine does of value)."""
        for name, size in self._core_inputs:
            if not name.saved and tensor.size() == size:
                name.saved = True
                self.name(tensor, name.site)
                return

    def close(self) -> None:
        """The layer's forward is over; from here on only handles live."""
        self._entries.clear()

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        if not _counts(tensor, self._books):
            return tensor
        entry = self._entry(tensor)
        name = _find(entry, tensor)
        if name is None and self._pending is not None:
            saved = Saved(None, None)
            self._pending.append((saved, tensor.detach()))
            return saved
        if name:
            name.saved = True
        site = name.site if name else self._default_site
        action = Action.keep if entry.shared else self._plan.action(site)
        if action is Action.recompute and name and name.produce and name.source:
            return self._recompute(tensor, name, name.produce, name.source)
        if action is Action.offload:
            if _nbytes(tensor) >= self._books.min_offload_bytes:
                return self._offload(tensor, entry, site)
            self._books.census.add_small(site)
        return self._keep(tensor, entry, site)

    def unpack(self, saved: Saved | torch.Tensor) -> torch.Tensor:
        self._itinerary.reach(self._stop)
        return _unpack(saved)

    def _entry(self, tensor: torch.Tensor) -> _Entry:
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None:
            entry = self._entries[storage._cdata] = _Entry(StorageWeakRef(storage))
        return entry

    def _keep(self, tensor: torch.Tensor, entry: _Entry, site: str) -> Saved:
        if entry.kept is None:
            entry.kept = Kept(self._books.ledger, tensor)
            self._books.census.add(self._layer, site, Action.keep, entry.kept.new_bytes)
        return Saved(entry.kept, Geometry.of(tensor))

    def _offload(self, tensor: torch.Tensor, entry: _Entry, site: str) -> Saved:
        storage = tensor.untyped_storage()
        # A part of a larger buffer goes by itself, compact, so that the buffer needn't stay for it.
        whole = _nbytes(tensor) >= storage.nbytes()
        geometry = Geometry.of(tensor)
        key = None if whole else geometry
        handle = entry.copies.get(key)
        if handle is None:
            leaving = tensor.detach()
            if whole:
                leaving = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            ticket, nbytes = self._books.tier.offload(leaving), _nbytes(leaving)
            handle = entry.copies[key] = Offloaded(self._books.ledger, ticket, nbytes, self._itinerary)
            self._books.census.add(self._layer, site, Action.offload, nbytes)
        return Saved(handle, geometry if whole else None)

    def _recompute(self, tensor: torch.Tensor, name: _Name, produce: Produce, source: Saved) -> Saved:
        if name.handle is None:
            name.handle = Recomputed(self._books.ledger, produce, source, name.geometry)
            self._books.census.add(self._layer, name.site, Action.recompute, tensor.untyped_storage().nbytes())
        return Saved(name.handle, Geometry.of(tensor))


def _unpack(saved: Saved | torch.Tensor) -> torch.Tensor:
    return saved.unpack() if isinstance(saved, Saved) else saved


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _counts(tensor: torch.Tensor, books: Books) -> bool:
    """Whether a saved tensor holds device bytes of its own: parameters and scalars on another device don't."""
    return tensor.device.type == books.device_type and tensor.untyped_storage()._cdata not in books.parameters


def _find(entry: _Entry, tensor: torch.Tensor) -> _Name | None:
    """The name of exactly this part of the storage, else of the one named part that holds it."""
    offset, count = int(tensor.storage_offset()), tensor.numel()
    exact = entry.names.get((offset, count))
    if exact is not None or len(entry.names) != 1:
        return exact
    (((first, length), name),) = entry.names.items()
    return name if first <= offset and offset + count <= first + length else None
