from __future__ import annotations

from memory.engine.itinerary import Itinerary


class Tensor:
    def __init__(self, name: str, sent_for: list[str]) -> None:
        self.name, self._sent_for = name, sent_for

    def prefetch(self) -> None:
        self._sent_for.append(self.name)


def journey(ahead_layers: int, layers: int = 3) -> tuple[Itinerary, list[Tensor], list[str]]:
    """Three layers of two tensors each: a of 10 bytes, b of 30. Layers after them have none."""
    sent_for: list[str] = []
    itinerary, tensors = Itinerary(ahead_layers), []
    for layer in range(layers):
        assert itinerary.enter_layer() == layer
        for name, nbytes in (("a", 10), ("b", 30)) if layer < 3 else ():
            tensors.append(Tensor(f"{name}{layer}", sent_for))
            assert itinerary.add(tensors[-1], nbytes) == len(tensors) - 1
    return itinerary, tensors, sent_for


def test_tensors_are_sent_for_a_layers_bytes_ahead() -> None:
    itinerary, tensors, sent_for = journey(1)
    itinerary.begin_backward()
    assert sent_for == ["b2", "a2"]
    itinerary.reach(2)
    itinerary.read(5)
    assert sent_for == ["b2", "a2", "b1"]
    itinerary.read(4)
    assert sent_for == ["b2", "a2", "b1", "a1"]
    itinerary.reach(1)
    itinerary.read(3)
    itinerary.read(2)
    itinerary.begin_backward()
    assert sent_for == ["b2", "a2", "b1", "a1", "b0", "a0"]
    assert len(tensors) == 6


def test_nothing_is_sent_for_more_than_a_layer_ahead_of_backward() -> None:
    itinerary, tensors, sent_for = journey(1, layers=6)
    itinerary.begin_backward()
    for layer in (5, 4):
        itinerary.reach(layer)
        assert sent_for == []
    itinerary.reach(3)
    assert sent_for == ["b2", "a2"]
    itinerary.reach(2)
    assert sent_for == ["b2", "a2"]
    # a layer that reads none of its tensors is past all the same
    itinerary.reach(1)
    assert sent_for == ["b2", "a2", "b1", "a1"]
    itinerary.read(3)
    assert sent_for == ["b2", "a2", "b1", "a1", "b0"]
    assert len(tensors) == 6


def test_nothing_is_sent_for_ahead_of_its_time_without_look_ahead() -> None:
    itinerary, _, sent_for = journey(0)
    itinerary.begin_backward()
    for place in (5, 4, 3):
        itinerary.reach(place // 2)
        itinerary.read(place)
    assert sent_for == []


def test_tensors_already_gone_are_passed_over() -> None:
    itinerary, tensors, sent_for = journey(3)
    del tensors[3]
    itinerary.begin_backward()
    assert sent_for == ["b2", "a2", "a1", "b0", "a0"]


def test_reading_out_of_order_sends_for_what_comes_next() -> None:
    itinerary, tensors, sent_for = journey(1)
    itinerary.reach(2)
    itinerary.read(4)
    assert sent_for == ["b2", "a2", "b1", "a1"]
    itinerary.read(5)
    assert sent_for == ["b2", "a2", "b1", "a1"]
    itinerary.reach(1)
    itinerary.read(1)
    assert sent_for == ["b2", "a2", "b1", "a1", "a0"]
    assert len(tensors) == 6
