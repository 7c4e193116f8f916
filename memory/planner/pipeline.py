"""A plan for all stages of a pipeline: predicted, decided for a budget or a slowdown, and its neighbours in price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memory.plan import Plan, keep_plan
from memory.planner.profiles import plan_of
from memory.planner.simulate import Simulation, simulate
from memory.planner.solve import Choice, Infeasible, solve
from memory.planner.stage import Stage

#: halvings of the range of budgets in the search for the smallest peak within a slowdown
_HALVINGS = 7


@dataclass(frozen=True)
class Pipeline:
    """All stages, one rank of each, and what a step takes beside its micro-batches."""

    stages: tuple[Stage, ...]
    num_layers: int
    #: optimizer and reductions that nothing hides
    update_s: float = 0.0

    @property
    def keep(self) -> Prediction:
        return predict(self, keep_plan(self.num_layers))

    def step_s(self, micro_batch_s: float) -> float:
        """A step's, from a micro-batch's on the slowest stage; filling and emptying of the pipeline included."""
        first = self.stages[0]
        return micro_batch_s * (first.micro_batches + (first.size - 1) / len(first.chunks)) + self.update_s


@dataclass(frozen=True)
class Prediction:
    """What a plan comes to."""

    plan: Plan
    simulations: tuple[Simulation, ...]
    step_s: float

    @property
    def worst(self) -> int:
        """The stage with the highest peak."""
        return max(range(len(self.simulations)), key=lambda rank: self.simulations[rank].peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.simulations[self.worst].peak_bytes

    @property
    def slowest(self) -> int:
        return max(range(len(self.simulations)), key=lambda rank: self.simulations[rank].micro_batch_s)


@dataclass(frozen=True)
class Decision:
    """A plan, and how far it is from the best that the limits of link and recomputation would allow."""

    prediction: Prediction
    lower_bound_s: float
    #: integer program, greedy or keep, of the slowest stage
    found_by: str


def predict(pipeline: Pipeline, plan: Plan) -> Prediction:
    simulations = tuple(simulate(stage, plan) for stage in pipeline.stages)
    return Prediction(plan, simulations, pipeline.step_s(max(s.micro_batch_s for s in simulations)))


def decide(pipeline: Pipeline, budget_bytes: int, *, use_scipy: bool = True, thorough: bool = True) -> Decision:
    """The fastest plan whose predicted peak is within the budget on every stage.

    thorough=False: fewer plans are tried. Raises Infeasible with the smallest budget that all stages have a plan for.
    """
    choices: list[Choice] = []
    smallest_bytes = 0
    for stage in pipeline.stages:
        try:
            choices.append(
                _as_before(stage, pipeline.num_layers, budget_bytes, choices)
                or solve(stage, pipeline.num_layers, budget_bytes, use_scipy=use_scipy, thorough=thorough)
            )
        except Infeasible as error:
            smallest_bytes = max(smallest_bytes, error.smallest_bytes)
    if smallest_bytes:
        raise Infeasible(smallest_bytes)
    slowest = max(choices, key=lambda choice: choice.seconds)
    plan = plan_of([pair for choice in choices for pair in choice.profiles], pipeline.num_layers)
    prediction = Prediction(plan, tuple(c.simulation for c in choices), pipeline.step_s(slowest.seconds))
    bound_s = pipeline.step_s(max(choice.lower_bound_s for choice in choices))
    return Decision(prediction, bound_s, slowest.found_by)


def _as_before(stage: Stage, num_layers: int, budget_bytes: int, before: Sequence[Choice]) -> Choice | None:
    """The previous stage's choice, where it fits and makes this stage no slower than the slowest so far.

    Later stages have fewer micro-batches in flight, so it often does, and the pipeline waits for its slowest stage
    anyway. A stage that can keep everything is left to do so.
    """
    if not before or before[-1].found_by == "keep":
        return None
    keep = simulate(stage, keep_plan(num_layers))
    if keep.peak_bytes <= budget_bytes:
        return None
    previous = [profile for _, profile in before[-1].profiles]
    if len(previous) != len(stage.layers):
        return None
    assignment = tuple(zip(stage.layers, previous, strict=True))
    simulation = simulate(stage, plan_of(assignment, num_layers))
    fits_host = stage.host_limit_bytes is None or simulation.host_bytes <= stage.host_limit_bytes
    if simulation.peak_bytes > budget_bytes or not fits_host:
        return None
    if simulation.micro_batch_s > max(choice.seconds for choice in before):
        return None
    return Choice(assignment, simulation, min(before[-1].lower_bound_s, simulation.micro_batch_s), before[-1].found_by)


def smallest_peak_bytes(pipeline: Pipeline) -> int:
    """The smallest budget that a plan is found for."""
    try:
        return decide(pipeline, 1, thorough=False).prediction.peak_bytes
    except Infeasible as error:
        return error.smallest_bytes


def thriftiest(pipeline: Pipeline, max_slowdown: float) -> Decision:
    """The plan of the smallest peak whose step takes at most (1 + max_slowdown) times that of keeping everything."""
    keep = pipeline.keep
    limit_s = keep.step_s * (1 + max_slowdown)
    best = decide(pipeline, keep.peak_bytes)
    low, high = smallest_peak_bytes(pipeline), keep.peak_bytes
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        try:
            found = decide(pipeline, middle)
        except Infeasible:
            low = middle
            continue
        if found.prediction.step_s <= limit_s:
            best, high = found, found.prediction.peak_bytes
        else:
            low = middle
    return best


def frontier(pipeline: Pipeline, count: int, *, at_most_bytes: int | None = None) -> list[Prediction]:
    """Plans from cheap to thrifty: each takes less memory than the one before it, and the time that this costs.

    count: budgets tried, evenly spread from keeping everything (or at_most_bytes) to the smallest possible.
    """
    keep = pipeline.keep
    floor_bytes = smallest_peak_bytes(pipeline)
    top = min(keep.peak_bytes, at_most_bytes or keep.peak_bytes)
    budgets = [top - (top - floor_bytes) * index // max(1, count - 1) for index in range(count)]
    found = [keep] if top == keep.peak_bytes else []
    for budget in budgets[len(found) :]:
        try:
            found.append(decide(pipeline, budget, thorough=False).prediction)
        except Infeasible:
            continue
    # What takes more memory and more time than another is no step on the way down.
    found = [one for one in found if not any(_worse(one, other) for other in found)]
    return sorted({one.peak_bytes: one for one in found}.values(), key=lambda p: -p.peak_bytes)


def _worse(one: Prediction, other: Prediction) -> bool:
    return other.peak_bytes < one.peak_bytes and other.step_s < one.step_s
