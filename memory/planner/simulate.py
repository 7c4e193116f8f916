"""Runs a plan on paper: compute, two copy streams and device memory, event by event, as the engine would run it.

The caching allocator hands memory out in the order in which the program asks, not when the device gets there, so the
peak follows from the order of events alone; the seconds follow from three clocks that wait for each other where the
engine makes streams wait (memory/engine/cuda_host.py, itinerary.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memory.plan import Action, LayerPlan, Plan
from memory.planner.costs import PIECES, REMADE
from memory.planner.stage import Stage, schedule
from memory.sites import INSIDE_REGION

#: what device memory is counted under
CATEGORIES = ("weights", "gradients", "optimizer", "saved", "offload buffers", "loss head", "transient", "workspace")
_PLACES = {site: place for place, site in enumerate(site for sites in PIECES.values() for site in sites)}


@dataclass(frozen=True)
class Simulation:
    """One stage under one plan."""

    peak_bytes: int
    #: at the peak, by CATEGORIES
    by_category: Mapping[str, int]
    #: where the peak is: forward or backward, and of which layer (loss head: -1)
    peak_at: tuple[str, int]
    #: busy time of this stage in one micro-batch, stalls included
    micro_batch_s: float
    #: of that, compute waiting for copies out and back
    stall_out_s: float
    stall_back_s: float
    #: of that, spent on making tensors again
    remake_s: float
    #: one micro-batch, one way
    offloaded_bytes: int
    #: the most that lies in host memory at one time
    host_bytes: int


class _Ticket:
    """An offloaded tensor on its way."""

    __slots__ = ("back_s", "layer", "left_s", "nbytes", "original", "returned")

    def __init__(self, nbytes: int, left_s: float, layer: int) -> None:
        self.nbytes, self.left_s, self.layer = nbytes, left_s, layer
        #: on the device: what was sent, and what has come back
        self.original, self.returned = True, False
        self.back_s = 0.0


class _Pass:
    """One micro-batch on one chunk: its tickets, and the way back as memory/engine/itinerary.py has it."""

    def __init__(self) -> None:
        self.tickets: list[_Ticket] = []
        self.before = [0]
        #: how many tickets there were when each layer began
        self.began: list[int] = []
        self.index: dict[int, int] = {}
        self.largest = 0
        self.layer = self.place = 0
        self.sent_for: int | None = None
        self.places: dict[tuple[int, str], int] = {}
        #: on the device for backward, by (layer, site)
        self.made: dict[tuple[int, str], tuple[str, int]] = {}


def simulate(stage: Stage, plan: Plan) -> Simulation:
    """The stage's layers under a plan of the whole model."""
    return _Run(stage, plan).result()


class _Run:
    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.stage, self.plan, self.cost = stage, plan, stage.cost
        self.now = self.out_free = self.back_free = 0.0
        self.stall_out = self.stall_back = self.remake = 0.0
        self.by = dict.fromkeys(CATEGORIES, 0)
        self.total = self.peak = 0
        self.peak_by: dict[str, int] = {}
        self.where = self.peak_where = ("states", -1)
        self.leaving: deque[_Ticket] = deque()
        self.leaving_bytes = self.layer_bytes = self.largest_layer = self.layers_run = 0
        #: what may be held in forward, learnt in the first pass (memory/engine/cuda_host.py)
        self.mark_bytes, self.marking = 0, True
        self.offloaded = self.host = self.most_host = 0
        self.residual = self.cost.site_bytes["layer_input"]
        self.pas = _Pass()
        self.grown: dict[tuple[int, str], int] = {}

    # -- memory

    def take(self, category: str, nbytes: int) -> None:
        self.by[category] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak, self.peak_by, self.peak_where = self.total, dict(self.by), self.where

    def drop(self, category: str, nbytes: int) -> None:
        self.by[category] -= nbytes
        self.total -= nbytes

    def touch(self, nbytes: int) -> None:
        self.take("transient", nbytes)
        self.drop("transient", nbytes)

    # -- the whole

    def result(self) -> Simulation:
        stage = self.stage
        self.take("weights", stage.weight_bytes)
        self.take("gradients", stage.gradient_bytes)
        self.take("optimizer", stage.optimizer_bytes)
        self.take("workspace", stage.workspace_bytes)
        count = stage.simulated_micro_batches
        before = (0.0, 0.0, 0.0, 0.0)
        # The first step is unlike the others: what it holds decides when they wait. One stage alone is run twice.
        steps = 2 if stage.size == 1 else 1
        for step in range(steps):
            if step:
                before = (self.now, self.stall_out, self.stall_back, self.remake)
                self.offloaded = 0
                self.drop("gradients", sum(self.grown.values()))
                self.grown.clear()
            self.run_step(count)
        after = (self.now, self.stall_out, self.stall_back, self.remake)
        now, stall_out, stall_back, remake = ((a - b) / count for a, b in zip(after, before, strict=True))
        return Simulation(
            peak_bytes=self.peak,
            by_category=self.peak_by,
            peak_at=self.peak_where,
            micro_batch_s=now,
            stall_out_s=stall_out,
            stall_back_s=stall_back,
            remake_s=remake,
            offloaded_bytes=self.offloaded // count,
            host_bytes=self.most_host,
        )

    def run_step(self, count: int) -> None:
        stage, passes = self.stage, dict[tuple[int, int], _Pass]()
        for forward, chunk, number in schedule(stage.rank, stage.size, len(stage.chunks), count):
            last = stage.rank == stage.size - 1 and chunk == len(stage.chunks) - 1
            if forward:
                self.pas = passes[chunk, number] = _Pass()
                self.forward(stage.chunks[chunk], last)
            else:
                self.pas = passes.pop((chunk, number))
                self.backward(stage.chunks[chunk], last, first=not chunk)

    def forward(self, layers: Sequence[int], last: bool) -> None:
        for number in layers:
            self.where = ("forward", number)
            span = self.plan.span_of(number)
            if span is not None and number > span[0]:
                continue  # its span's first layer has run it
            self.pas.index[number] = len(self.pas.began)
            self.pas.began.append(len(self.pas.tickets))
            if span is None:
                self.layer_forward(number, self.plan.layers[number])
            else:
                self.save(number, "layer_input", self.plan.layers[number])
                self.now += (span[1] - span[0]) * self.cost.forward_s
                self.touch(self.cost.site_bytes["fc1_out"] + self.cost.site_bytes["act_out"] + self.residual)
            self.layers_run += 1
            self.layer_bytes = 0
            self.let_go()
        if last:
            self.where = ("forward", -1)
            self.take("loss head", self.stage.head.kept_bytes)
            self.take("loss head", self.stage.head.transient_bytes)
            self.drop("loss head", self.stage.head.transient_bytes)
            self.now += self.stage.head.forward_s

    def backward(self, layers: Sequence[int], last: bool, first: bool) -> None:
        if last:
            self.where = ("backward", -1)
            self.begin_backward()
            self.take("loss head", self.stage.head.transient_bytes)
            self.drop("loss head", self.stage.head.transient_bytes + self.stage.head.kept_bytes)
            self.grow("gradients", self.stage.head.gradient_bytes, (-1, "head"))
            self.now += self.stage.head.backward_s
        done: set[int] = set()
        # The gradient of the layer's output: one for the residual stream, one for the branch.
        self.take("transient", 2 * self.residual)
        for number in reversed(layers):
            self.where = ("backward", number)
            span = self.plan.span_of(number)
            if span is not None and span[1] - 1 not in done:
                self.remake_span(range(*span), self.plan.layers[span[0]])
            done.add(number)
            self.layer_backward(number, LayerPlan() if span is not None else self.plan.layers[number])
            if span is not None and number == span[0]:
                self.drop("transient", self.residual)
                if number == span[0]:
                    self.release(number, "region_input")
        self.drop("transient", 2 * self.residual)
        if first and self.stage.rank == 0:
            self.where = ("backward", -1)
            self.grow("gradients", self.stage.embedding_gradient_bytes, (-1, "embedding"))

    def grow(self, category: str, nbytes: int, key: tuple[int, str]) -> None:
        """A gradient: it stays where there is no buffer for it, once; else it is added to the buffer and goes."""
        if not self.stage.gradients_grow or key in self.grown:
            self.touch(nbytes)
            return
        self.grown[key] = nbytes
        self.take(category, nbytes)

    # -- forward of a layer

    def layer_forward(self, number: int, layer: LayerPlan) -> None:
        inside = {site for region in layer.regions for site in INSIDE_REGION[region]}
        passing = 0
        self.take("saved", self.cost.rest_bytes)
        for piece, sites in PIECES.items():
            if piece == "core":
                self.now += self.cost.seconds[piece]
            for site in sites:
                if site not in inside:
                    self.save(number, site, layer)
                if site in ("mlp_norm_out", "fc1_out", "act_out") and (
                    site in inside or layer.action(site) is Action.recompute
                ):
                    passing += self.cost.site_bytes[site]
            if piece != "core":
                self.now += self.cost.seconds[piece]
        self.touch(passing + self.residual)

    def save(self, number: int, site: str, layer: LayerPlan) -> None:
        key = "region_input" if self.plan.span_of(number) is not None else site
        action, nbytes = layer.action(site), self.cost.site_bytes[site]
        if action is Action.offload and nbytes >= self.plan.min_offload_bytes:
            self.offload(number, key, nbytes)
        elif action is not Action.recompute:
            nbytes = self.cost.kept_bytes[site]
            self.take("saved", nbytes)
            self.pas.made[number, key] = ("saved", nbytes)

    # -- the way out

    def offload(self, number: int, site: str, nbytes: int) -> None:
        began = max(self.out_free, self.now)
        self.out_free = began + nbytes / self.stage.link_bytes_per_s
        self.now += nbytes * self.cost.seconds_per_copied_byte
        ticket, pas = _Ticket(nbytes, self.out_free, self.layers_run), self.pas
        pas.places[number, site] = len(pas.tickets)
        pas.tickets.append(ticket)
        pas.before.append(pas.before[-1] + nbytes)
        pas.largest = max(pas.largest, pas.before[-1] - pas.before[pas.began[-1]])
        self.offloaded += nbytes
        self.host += nbytes
        self.most_host = max(self.most_host, self.host)
        self.take("offload buffers", nbytes)
        self.leaving.append(ticket)
        self.leaving_bytes += nbytes
        self.layer_bytes += nbytes
        self.largest_layer = max(self.largest_layer, self.layer_bytes)
        self.let_go()

    def let_go(self) -> None:
        """Originals that are late go, and compute waits for them, where more than ever would be held."""
        window = self.stage.window_layers
        while self.leaving:
            oldest = self.leaving[0]
            late = self.leaving_bytes > window * self.largest_layer or self.layers_run - oldest.layer > window
            over = self.marking or not window or self.held_bytes > self.mark_bytes
            if oldest.original and not (late and over):
                break
            self.leaving.popleft()
            if oldest.original:
                self.stall_out += max(0.0, oldest.left_s - self.now)
                self.now = max(self.now, oldest.left_s)
                oldest.original = False
                self.leaving_bytes -= oldest.nbytes
                self.drop("offload buffers", oldest.nbytes)
        self.mark_bytes = max(self.mark_bytes, self.held_bytes)

    @property
    def held_bytes(self) -> int:
        return self.by["saved"] + self.by["offload buffers"] + self.by["loss head"]

    # -- the way back

    def begin_backward(self) -> None:
        pas = self.pas
        if pas.sent_for is None:
            self.marking = False
            pas.layer, pas.place = len(pas.began), len(pas.tickets)
            pas.sent_for = pas.place
            self.send()

    def reach(self, number: int) -> None:
        """Backward is in this layer: those after it are done."""
        self.begin_backward()
        pas, layer = self.pas, self.pas.index[number]
        if layer < pas.layer:
            pas.layer = layer
            pas.place = min(pas.place, pas.began[layer + 1] if layer + 1 < len(pas.began) else len(pas.tickets))
            self.send()

    def send(self) -> None:
        pas = self.pas
        assert pas.sent_for is not None
        first_layer = max(pas.layer - self.plan.reload_ahead, 0)
        first = pas.began[first_layer] if first_layer < len(pas.began) else len(pas.tickets)
        ahead = self.plan.reload_ahead * pas.largest
        while pas.sent_for > first and pas.before[pas.place] - pas.before[pas.sent_for] < ahead:
            pas.sent_for -= 1
            self.prefetch(pas.tickets[pas.sent_for])

    def prefetch(self, ticket: _Ticket) -> None:
        if ticket.original or ticket.returned:
            return
        self.take("offload buffers", ticket.nbytes)
        ticket.returned = True
        began = max(self.back_free, self.now, ticket.left_s)
        self.back_free = ticket.back_s = began + ticket.nbytes / self.stage.link_bytes_per_s
        self.now += ticket.nbytes * self.cost.seconds_per_copied_byte

    def fetch(self, number: int, site: str) -> None:
        pas = self.pas
        place = pas.places[number, site]
        ticket = pas.tickets[place]
        if ticket.original:
            ticket.original = False
            self.leaving_bytes -= ticket.nbytes
        else:
            self.prefetch(ticket)
            ticket.returned = False
            self.stall_back += max(0.0, ticket.back_s - self.now)
            self.now = max(self.now, ticket.back_s)
        # Read again under its own name until the last reader has it.
        pas.made[number, site] = ("offload buffers", ticket.nbytes)
        self.host -= ticket.nbytes
        assert pas.sent_for is not None
        pas.place, pas.sent_for = min(pas.place, place), min(pas.sent_for, place)
        self.send()

    def need(self, number: int, site: str, layer: LayerPlan) -> None:
        """The site's tensor on the device."""
        if (number, site) in self.pas.made:
            return
        if (number, site) in self.pas.places:
            self.fetch(number, site)
        elif layer.action(site) is Action.recompute:
            source, piece = REMADE[site]
            self.need(number, source, layer)
            self.spend(self.cost.seconds[piece])
            self.make(number, site)

    def make(self, number: int, site: str) -> None:
        nbytes = self.cost.site_bytes[site]
        self.take("transient", nbytes)
        self.pas.made[number, site] = ("transient", nbytes)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.remake += seconds

    def release(self, number: int, site: str) -> None:
        held = self.pas.made.pop((number, site), None)
        if held:
            self.drop(*held)

    # -- backward of a layer

    def remake_span(self, numbers: Sequence[int], head: LayerPlan) -> None:
        """The span's layers run forward again, keeping everything."""
        first = numbers[0]
        self.reach(first)
        self.need(first, "region_input", head)
        for number in numbers:
            self.spend(self.cost.forward_s)
            self.take("saved", self.cost.rest_bytes)
            for site in _PLACES:
                # The first layer's input is the region's own.
                if not (number == first and site == "layer_input"):
                    nbytes = self.cost.kept_bytes[site]
                    self.take("transient", nbytes)
                    self.pas.made[number, site] = ("transient", nbytes)
        self.take("transient", self.residual)

    def layer_backward(self, number: int, layer: LayerPlan) -> None:
        size, seconds, grads = self.cost.site_bytes, self.cost.seconds, self.cost.gradient_bytes
        residual, query, key = self.residual, size["query"], size["key"]
        if number in self.pas.index:
            self.reach(number)
        if "mlp" in layer.regions:
            self.need(number, "mlp_norm_out", layer)
            self.spend(seconds["fc1"] + seconds["act"] + seconds["fc2"])
            self.make(number, "fc1_out")
            self.make(number, "act_out")
            self.touch(residual)
        self.need(number, "act_out", layer)
        self.step("fc2", size["act_out"], grads["fc2"], number)
        self.release(number, "act_out")
        self.need(number, "fc1_out", layer)
        self.take("transient", size["fc1_out"])
        self.now += self.cost.backward_s("act")
        self.drop("transient", size["act_out"])
        self.release(number, "fc1_out")
        self.need(number, "mlp_norm_out", layer)
        self.step("fc1", residual, grads["fc1"], number)
        self.drop("transient", size["fc1_out"])
        self.release(number, "mlp_norm_out")
        self.need(number, "mlp_residual", layer)
        self.step("mlp_norm", residual, 0, number)
        self.release(number, "mlp_residual")
        self.drop("transient", 2 * residual)
        self.need(number, "core_attn_out", layer)
        self.step("proj", query, grads["proj"], number)
        for site in ("query", "key", "value", "attn_scores"):
            self.need(number, site, layer)
        if "core_attn" in layer.regions:
            self.spend(seconds["core"])
            self.make(number, "attn_scores")
            self.touch(query)
        # Gradients of query, key and value, and the former summed up in fp32.
        self.take("transient", query + 2 * key)
        fp32_query = query * 4 // self.cost.shape.element_bytes if self.cost.shape.fused_attention else 0
        self.touch(fp32_query + (0 if self.cost.shape.fused_attention else size["attn_scores"]))
        self.now += self.cost.backward_s("core")
        self.drop("transient", query)
        for site in ("query", "key", "value", "attn_scores", "core_attn_out"):
            self.release(number, site)
        self.need(number, "attn_norm_out", layer)
        self.step("qkv", residual, grads["qkv"], number)
        self.drop("transient", query + 2 * key)
        self.release(number, "attn_norm_out")
        self.need(number, "layer_input", layer)
        self.step("attn_norm", residual, 0, number)
        self.drop("transient", 2 * residual)
        self.release(number, "layer_input")
        self.drop("saved", self.cost.rest_bytes)

    def step(self, piece: str, input_gradient: int, weight_gradient: int, number: int) -> None:
        """Backward of one piece; the gradient of its input stays for the caller to drop."""
        self.take("transient", input_gradient)
        self.grow("gradients", weight_gradient, (number, piece))
        self.now += self.cost.backward_s(piece)
