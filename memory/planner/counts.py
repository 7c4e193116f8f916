"""How many layers follow each profile: an integer program, solved by scipy's HiGHS. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memory.planner.profiles import Profile

#: of a layer's offloaded bytes, the part that is back before the layer above it has run backward
AHEAD = 0.6
_NODES = 1000


@dataclass(frozen=True)
class Counting:
    """What the counts have to keep to. Bytes are of the device, for all passes in flight."""

    options: Sequence[Profile]
    layers: int
    in_flight: int
    #: for what the layers keep at the end of forward
    room_bytes: float
    #: for what comes back early while backward nears the model's input
    reload_bytes: float
    #: layers' worth of bytes that may be on their way out
    window_layers: float
    link_bytes_per_s: float
    #: in which copies can leave, and come back
    forward_s: float
    backward_s: float
    host_bytes: float | None = None


@dataclass(frozen=True)
class Counts:
    of: Mapping[Profile, int]
    added_s: float
    #: of that, waiting for copies out
    wait_s: float


def count_layers(task: Counting, *, relaxed: bool = False) -> Counts | None:
    """The counts that add the fewest seconds; None where none keep to the limits.

    relaxed: fractions of layers, whose seconds are a lower bound; `of` is then rounded and good for nothing.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    kept, away, added, _ = columns(task.options)
    # The largest size in use, which may be on its way at one time. One variable for each size, whether it or a larger
    # one is in use, worth what it is above the size below it.
    sizes = np.unique(away[away > 0])
    windows = task.window_layers * np.diff(sizes, prepend=0.0)
    link, count, levels = task.link_bytes_per_s, len(task.options), len(sizes)

    def row(of_count: Any = 0.0, of_level: Any = 0.0, waits: Sequence[float] = (0, 0)) -> Any:
        return np.concatenate([np.broadcast_to(of_count, count), np.broadcast_to(of_level, levels), waits])

    # In GiB and milliseconds, so that the solver's tolerances are small beside the numbers.
    gib = 1.0 / (1 << 30)
    # The last layer's tensors may be on their way at the end of forward. The last layer can be one that sends nothing.
    late = windows if relaxed else 0.0 * windows
    limits = [
        (row(task.in_flight * kept * gib, late * gib), task.room_bytes * gib),
        (row(away / link * 1e3, -late / link * 1e3, (-1, 0)), task.forward_s * 1e3),
        (row((away / link - added) * 1e3, waits=(0, -1)), task.backward_s * 1e3),
    ]
    if task.host_bytes is not None:
        limits.append((row(task.in_flight * away * gib), task.host_bytes * gib))
    if not relaxed:
        limits.append((row(of_level=AHEAD * windows * gib), task.reload_bytes * gib))
        limits += [(row(away >= size, -task.layers * (sizes == size)), 0.0) for size in sizes]
    whole = 0 if relaxed else 1
    solution = milp(
        row(added * 1e3, waits=(1, 1)),
        constraints=[
            LinearConstraint(np.array([limit for limit, _ in limits]), -np.inf, [most for _, most in limits]),
            LinearConstraint(row(1.0), task.layers, task.layers),
        ],
        bounds=Bounds(0.0, row(task.layers, 1.0, (np.inf, np.inf))),
        integrality=row(whole, whole),
        # by nodes, not by seconds: all ranks must find the same
        options={"node_limit": _NODES, "mip_rel_gap": 3e-3},
    )
    if solution.x is None:
        return None
    numbers = {option: round(float(number)) for option, number in zip(task.options, solution.x, strict=False)}
    return Counts(
        {option: number for option, number in numbers.items() if number},
        added_s=float(solution.fun) / 1e3,
        wait_s=float(solution.x[-2]) / 1e3,
    )


def count_pairs(task: Counting, most: int) -> list[Mapping[Profile, int]]:
    """Two profiles in every proportion, by the same limits: the `most` that add the fewest seconds, best first.

    Near the least budget a plan is held by its peaks within backward, which count_layers sees only roughly: then
    several plans that look much alike are worth simulating.
    """
    import numpy as np

    options, layers = task.options, task.layers
    one, other, count = (grid.ravel() for grid in np.indices((len(options), len(options), layers + 1)))
    worth = (one < other) | ((one == other) & (count == 0))
    one, other, count = one[worth], other[worth], count[worth]
    kept, away, added, backward = columns(options)

    def total(values: Any) -> Any:
        return count * values[one] + (layers - count) * values[other]

    def largest(values: Any) -> Any:
        return np.maximum(np.where(count > 0, values[one], 0), np.where(count < layers, values[other], 0))

    window = task.window_layers * largest(away)
    seconds = total(added) + np.maximum(0.0, total(away) / task.link_bytes_per_s - task.forward_s)
    fits = (task.in_flight * total(kept) <= task.room_bytes) & (largest(backward) + AHEAD * window <= task.reload_bytes)
    best = np.argsort(np.where(fits, seconds, np.inf))[: min(most, int(fits.sum()))]
    pairs = [((options[one[i]], int(count[i])), (options[other[i]], layers - int(count[i]))) for i in best]
    return [{option: number for option, number in pair if number} for pair in pairs]


def columns(options: Sequence[Profile]) -> tuple[Any, Any, Any, Any]:
    """(kept bytes, offloaded bytes, added seconds, bytes in backward) of these profiles, as arrays."""
    import numpy as np

    names = ("kept_bytes", "offloaded_bytes", "added_s", "backward_bytes")
    kept, away, added, backward = (np.array([getattr(option, name) for option in options], float) for name in names)
    return kept, away, added, backward
