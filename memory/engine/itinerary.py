"""The way back: which offloaded tensors start towards the device when, while backward goes through the layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol


class Traveller(Protocol):
    def prefetch(self) -> None:
        """Start the way back, unless it has started."""


class Itinerary:
    """One micro-batch's offloaded tensors on one model chunk, in forward order: backward reads them in the other.

    Tensors are on their way `ahead_layers` layers' worth of bytes before the one that backward reads now, one by one
    rather than a layer at once, and not before backward is so many layers away from theirs: none lies on the device
    longer than it must.
    """

    def __init__(self, ahead_layers: int, on_backward: Callable[[], None] = lambda: None) -> None:
        """on_backward is called once, when backward begins."""
        self._ahead_layers, self._on_backward = ahead_layers, on_backward
        self._travellers: list[weakref.ref[Traveller]] = []
        #: bytes before each tensor, and of all
        self._before_bytes = [0]
        #: how many tensors had set out when each layer began
        self._layer_began: list[int] = []
        self._largest_layer_bytes = 0
        #: what backward has come to, a layer and a tensor's place
        self._layer = self._place = 0
        #: all from here on have been sent for; None: backward has not begun
        self._sent_for: int | None = None

    def enter_layer(self) -> int:
        """Forward begins a layer; returns its number."""
        self._layer_began.append(len(self._travellers))
        return len(self._layer_began) - 1

    def add(self, traveller: Traveller, nbytes: int) -> int:
        """Put down one more; returns its place."""
        self._travellers.append(weakref.ref(traveller))
        self._before_bytes.append(self._before_bytes[-1] + nbytes)
        layer_bytes = self._before_bytes[-1] - self._before_bytes[self._layer_began[-1]]
        self._largest_layer_bytes = max(self._largest_layer_bytes, layer_bytes)
        return len(self._travellers) - 1

    def begin_backward(self) -> None:
        """Send for the last layers' tensors before backward reaches them."""
        if self._sent_for is None:
            self._layer, self._place = len(self._layer_began), len(self._travellers)
            self._sent_for = self._place
            self._on_backward()
            self._send()

    def reach(self, layer: int) -> None:
        """Backward is in this layer: those after it are done."""
        self.begin_backward()
        if layer < self._layer:
            self._layer = layer
            past = self._layer_began[layer + 1] if layer + 1 < len(self._layer_began) else len(self._travellers)
            self._place = min(self._place, past)
            self._send()

    def read(self, place: int) -> None:
        """Backward reads the tensor at this place: send for those that it will read next."""
        self.begin_backward()
        assert self._sent_for is not None
        self._place, self._sent_for = min(self._place, place), min(self._sent_for, place)
        self._send()

    def _send(self) -> None:
        assert self._sent_for is not None
        ahead_bytes = self._ahead_layers * self._largest_layer_bytes
        first_layer = max(self._layer - self._ahead_layers, 0)
        first = self._layer_began[first_layer] if first_layer < len(self._layer_began) else len(self._travellers)
        while (
            self._sent_for > first
            and self._before_bytes[self._place] - self._before_bytes[self._sent_for] < ahead_bytes
        ):
            self._sent_for -= 1
            traveller = self._travellers[self._sent_for]()
            if traveller is not None:
                traveller.prefetch()
