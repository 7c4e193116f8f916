"""The way back: which offloaded tensors start towards the device when, while backward goes through the layers."""

from __future__ import annotations

import weakref
from typing import Protocol


class Traveller(Protocol):
    def prefetch(self) -> None:
        """Start the way back, unless it has started."""


class Itinerary:
    """One micro-batch's offloaded tensors on one model chunk, in forward order: backward reads them in the other.

    Tensors are on their way `ahead_layers` layers' worth of bytes before the one that backward reads now: one by one
    rather than a layer at once, so that no more than that lies on the device early.
    """

    def __init__(self, ahead_layers: int) -> None:
        self._ahead_layers = ahead_layers
        self._travellers: list[weakref.ref[Traveller]] = []
        #: bytes before each tensor, and of all
        self._before_bytes = [0]
        self._layer_began_bytes = 0
        self._largest_layer_bytes = 0
        #: all from here on have been sent for; None: backward has not begun
        self._sent_for: int | None = None

    def enter_layer(self) -> None:
        self._layer_began_bytes = self._before_bytes[-1]

    def add(self, traveller: Traveller, nbytes: int) -> int:
        """Put down one more; returns its place."""
        self._travellers.append(weakref.ref(traveller))
        self._before_bytes.append(self._before_bytes[-1] + nbytes)
        self._largest_layer_bytes = max(self._largest_layer_bytes, self._before_bytes[-1] - self._layer_began_bytes)
        return len(self._travellers) - 1

    def begin_backward(self) -> None:
        """Send for the last layers' tensors before backward reaches them."""
        if self._sent_for is None:
            self.read(len(self._travellers))

    def read(self, place: int) -> None:
        """Backward reads the tensor at this place: send for those that it will read next."""
        if self._sent_for is None or self._sent_for > place:
            self._sent_for = place
        ahead_bytes = self._ahead_layers * self._largest_layer_bytes
        while self._sent_for > 0 and self._before_bytes[place] - self._before_bytes[self._sent_for] < ahead_bytes:
            self._sent_for -= 1
            traveller = self._travellers[self._sent_for]()
            if traveller is not None:
                traveller.prefetch()
