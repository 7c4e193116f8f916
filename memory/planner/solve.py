"""The cheapest plan of one stage for a memory budget: counts of layer profiles, placed and checked by simulation.

Layers of a stage are alike, so what is decided first is how many of them follow each profile (counts.py); where they
stand, and the peaks within backward, are settled by simulating a few orders. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memory.plan import keep_plan
from memory.planner.counts import Counting, count_layers, count_pairs
from memory.planner.profiles import Profile, plan_of, profiles
from memory.planner.simulate import Simulation, simulate
from memory.planner.stage import Stage

#: integer programs for one set of profiles, each corrected by what the simulation of the last one showed
_CORRECTIONS = 4
#: a plan waits for the link no longer than foreseen, up to this share of the step
_WAIT_TOLERANCE = 0.003
#: a share of the step: a plan no further than this from the lower bound is not sought any better
_CLOSE = 5e-4
#: pairs of profiles looked at closely
_PAIRS = 24
#: simulations of one solve, counted in layers, at least and at most so many plans
_SIMULATED_LAYERS, _SIMULATED_PLANS = 6000, (40, 600)

_Assignment = tuple[tuple[int, Profile], ...]


@dataclass(frozen=True)
class Choice:
    """A plan for one stage's layers; other stages' layers keep."""

    profiles: _Assignment
    simulation: Simulation
    #: of this stage's micro-batch, under any plan that fits: recomputation and the link's capacity alone
    lower_bound_s: float
    #: integer program or greedy; keep where nothing had to be done
    found_by: str

    @property
    def seconds(self) -> float:
        return self.simulation.micro_batch_s


class Infeasible(ValueError):
    """No plan fits. `smallest_bytes` is the least budget that one was found for."""

    def __init__(self, smallest_bytes: int) -> None:
        super().__init__(f"the smallest budget that a plan was found for is {smallest_bytes / (1 << 30):.2f} GiB")
        self.smallest_bytes = smallest_bytes


def solve(stage: Stage, num_layers: int, budget_bytes: int, *, use_scipy: bool = True, thorough: bool = True) -> Choice:
    """The plan of least time whose simulated peak is within the budget. num_layers: of the whole model.

    thorough=False: what the integer program and a few proportions say, without trying single changes.
    Raises Infeasible.
    """
    keep = simulate(stage, keep_plan(num_layers))
    options = profiles(stage.cost, offload=stage.host_limit_bytes != 0)
    nothing = tuple((number, options[0]) for number in stage.layers)
    if keep.peak_bytes <= budget_bytes:
        return Choice(nothing, keep, keep.micro_batch_s, "keep")
    search = _Search(stage, num_layers, budget_bytes, options, keep)
    bound_s = keep.micro_batch_s
    if use_scipy:
        bound_s += search.lower_bound_s()
        for cap in sorted({option.backward_bytes for option in options}, reverse=True):
            if search.by_counts(cap) or search.within(bound_s):
                break
        if not search.within(bound_s):
            search.by_pairs()
    found_by = "integer program" if search.best else "greedy"
    if search.best is None:
        search.by_greed()
    if search.best is None:
        search.by_thrift()
    if search.best is None:
        raise Infeasible(search.smallest_bytes)
    if thorough and not search.within(bound_s):
        search.polish()
    choice, simulation = search.best
    return Choice(choice, simulation, min(bound_s, simulation.micro_batch_s), found_by)


class _Search:
    """Candidates of one solve and the best of them so far."""

    def __init__(
        self, stage: Stage, num_layers: int, budget_bytes: int, options: Sequence[Profile], keep: Simulation
    ) -> None:
        self._stage, self._num_layers, self._budget = stage, num_layers, budget_bytes
        self._options, self._keep = options, keep
        self._tried: dict[_Assignment, Simulation] = {}
        self.best: tuple[_Assignment, Simulation] | None = None
        least, most = _SIMULATED_PLANS
        self._allowed = min(most, max(least, _SIMULATED_LAYERS // (len(stage.layers) * stage.simulated_micro_batches)))
        #: the least peak seen
        self.smallest_bytes = keep.peak_bytes

    def within(self, bound_s: float) -> bool:
        """Whether the best plan is so near this lower bound that no search can pay."""
        return self.best is not None and self.best[1].micro_batch_s <= (1 + _CLOSE) * bound_s

    @property
    def _spent(self) -> int:
        return len(self._tried)

    def consider(self, order: Sequence[Profile]) -> Simulation:
        """Simulate these profiles along the stage's layers; the best that fits is remembered."""
        assignment = tuple(zip(self._stage.layers, order, strict=True))
        simulation = self._tried.get(assignment)
        if simulation is None:
            simulation = self._tried[assignment] = simulate(self._stage, plan_of(assignment, self._num_layers))
        limit = self._stage.host_limit_bytes
        if limit is None or simulation.host_bytes <= limit:
            self.smallest_bytes = min(self.smallest_bytes, simulation.peak_bytes)
            faster = self.best is None or simulation.micro_batch_s < self.best[1].micro_batch_s
            if simulation.peak_bytes <= self._budget and faster:
                self.best = assignment, simulation
        return simulation

    # -- by integer program

    def lower_bound_s(self) -> float:
        """Added seconds of the relaxed program: fractions of layers, no peak within backward."""
        task = self._task(relaxed=True)
        found = count_layers(task, relaxed=True)
        return found.added_s if found else 0.0

    def by_counts(self, cap_bytes: int) -> bool:
        """Solve for profiles whose backward takes up to cap_bytes; True where that cap is no part of the problem."""
        task = self._task(relaxed=False)
        task = replace(
            task,
            options=[option for option in self._options if option.backward_bytes <= cap_bytes],
            reload_bytes=task.reload_bytes - cap_bytes,
        )
        settled = True
        for _ in range(_CORRECTIONS):
            found = count_layers(task)
            if found is None:
                return False
            simulations = [self.consider(order) for order in orders(found.of)]
            nearest = min(simulations, key=lambda s: (max(0, s.peak_bytes - self._budget), s.micro_batch_s))
            over_bytes = max(0, nearest.peak_bytes - self._budget)
            over_s = max(0.0, nearest.stall_out_s - found.wait_s)
            settled = settled and not over_bytes
            if not over_bytes and over_s <= _WAIT_TOLERANCE * self._keep.micro_batch_s:
                break
            task = replace(task, forward_s=task.forward_s - over_s)
            if nearest.peak_at[0] == "backward" and nearest.peak_at[1] != self._stage.layers[-1]:
                task = replace(task, reload_bytes=task.reload_bytes - over_bytes)
            else:
                task = replace(task, room_bytes=task.room_bytes - over_bytes)
        return settled

    def by_pairs(self) -> None:
        for counts in count_pairs(self._task(relaxed=False), _PAIRS):
            for order in orders(counts):
                if self._spent >= self._allowed // 2:
                    return
                self.consider(order)

    def _task(self, *, relaxed: bool) -> Counting:
        stage, layers = self._stage, len(self._stage.layers)
        states = stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes + stage.workspace_bytes
        # Where forward turns into backward: the loss head, or the last layer at work.
        turning = stage.head.kept_bytes + stage.head.transient_bytes
        if not relaxed:
            turning = max(turning, min(option.backward_bytes - option.kept_bytes for option in self._options))
        # Near the model's input, all gradients but those of two layers are there.
        grown = stage.head.gradient_bytes + (layers - 2) * stage.cost.all_gradient_bytes
        return Counting(
            options=self._options,
            layers=layers,
            in_flight=stage.in_flight,
            room_bytes=self._budget - states - turning,
            reload_bytes=math.inf if relaxed else self._budget - states - (grown if stage.gradients_grow else 0),
            window_layers=stage.window_layers,
            link_bytes_per_s=stage.link_bytes_per_s,
            forward_s=layers * stage.cost.forward_s,
            backward_s=2 * layers * stage.cost.forward_s + stage.head.backward_s,
            host_bytes=stage.host_limit_bytes,
        )

    # -- without it

    def by_greed(self) -> None:
        """From keeping everything, again and again the change that costs least for each byte it frees."""
        order = [self._options[0]] * len(self._stage.layers)
        steps = [list(order)]
        while True:
            moves = [
                ((option.added_s - now.added_s) / (now.kept_bytes - option.kept_bytes), place, option)
                for place, now in enumerate(order)
                for option in self._options
                if option.kept_bytes < now.kept_bytes
            ]
            if not moves:
                break
            _, place, option = min(moves, key=lambda move: move[:2])
            order[place] = option
            steps.append(list(order))
        # Each step frees more than the one before it: the first that fits, by halving.
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            fits = self.consider(steps[middle]).peak_bytes <= self._budget
            low, high = (low, middle) if fits else (middle + 1, high)
        self.consider(steps[low])

    def by_thrift(self) -> None:
        """All layers alike under each of the profiles that take least: what fits where nothing else does."""
        for option in sorted(self._options, key=lambda o: (o.kept_bytes + o.backward_bytes, o.added_s))[:12]:
            self.consider([option] * len(self._stage.layers))

    # -- once there is one

    def polish(self) -> None:
        """Change single layers as long as that makes the best plan faster."""
        assert self.best
        improved = True
        while improved:
            improved = False
            for candidate in self._neighbours([profile for _, profile in self.best[0]]):
                if self._spent >= self._allowed:
                    return
                before = self.best
                self.consider(candidate)
                if self.best is not before:
                    improved = True
                    break

    def _neighbours(self, order: Sequence[Profile]) -> Iterator[list[Profile]]:
        """The plan with one layer changed: the dearest layers first, each to the cheapest profiles first."""
        for place in sorted(range(len(order)), key=lambda place: -order[place].added_s):
            for option in self._options:
                if option != order[place]:
                    yield [*order[:place], option, *order[place + 1 :]]


def orders(counts: Mapping[Profile, int]) -> Iterator[list[Profile]]:
    """Orders of so many layers of each profile along the stage that are worth simulating."""
    spread = spread_out(counts)
    yield spread
    yield spread[::-1]
    items = [profile for profile, number in counts.items() for _ in range(number)]
    by_offload = sorted(items, key=lambda p: -p.offloaded_bytes)
    yield by_offload
    yield sorted(items, key=lambda p: (p.backward_bytes, -p.offloaded_bytes))
    # The last layers' copies have no time to leave: those that send least stand there.
    last = by_offload[-1]
    rest = dict(counts)
    rest[last] -= 1
    yield [*spread_out(rest), last]


def spread_out(counts: Mapping[Profile, int]) -> list[Profile]:
    """Each profile's layers as evenly along the stage as they go, so that the link is loaded evenly."""
    places = [
        ((index + 0.5) / number, -profile.offloaded_bytes, order, profile)
        for order, (profile, number) in enumerate(counts.items())
        for index in range(number)
    ]
    return [place[-1] for place in sorted(places, key=lambda place: place[:3])]
