"""Counting, leaks, shared storages, and the report on each option."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from memory.engine.census import Census
from memory.engine.door import Books, CountingDoor, LayerDoor
from memory.engine.handles import Handle
from memory.engine.host import EmulatedHostTier
from memory.engine.itinerary import Itinerary
from memory.engine.ledger import Ledger
from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from memory.plan import Action, LayerPlan, keep_plan
from memory.seed import seed_plan
from memory.sites import SITES
from models.config import ModelConfig
from tests.memory.conftest import BATCH, MODEL, Run, batch, build, run_plan, shape_of


def test_kept_bytes_are_the_closed_form(kept: Callable[[ModelConfig], Run]) -> None:
    run, shape = kept(MODEL), shape_of(MODEL)
    by_site = {(layer, site): nbytes for layer, site, _, nbytes, _ in run.engine.census.rows()}
    for layer in range(MODEL.num_layers):
        for site in SITES:
            if site == "value":  # a view: keeping it keeps the mixed qkv buffer
                expected = shape.sharded(MODEL.query_width + 2 * MODEL.kv_width)
            elif site == "rest":
                continue
            else:
                expected = SITES[site].bytes_of(shape)
            assert by_site[layer, site] == 2 * expected, f"{site} of layer {layer} in two micro-batches"


def test_the_peak_is_one_micro_batch_and_everything_is_let_go(kept: Callable[[ModelConfig], Run]) -> None:
    run = kept(MODEL)
    for step in run.steps:
        assert step.kept_bytes == 2 * step.peak_saved_bytes
        assert step.offloaded_bytes == step.recomputed_bytes == 0
    assert run.engine.held_bytes == 0


def test_full_holds_the_inputs_and_one_layer() -> None:
    options = RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=1)
    plan = seed_plan(options, OffloadOptions(), shape_of(MODEL), [range(MODEL.num_layers)]).plan
    model = replace(MODEL, hidden_dropout=0.0)
    step, keep = run_plan(model, plan).steps[-1], run_plan(model, keep_plan(4)).steps[-1]
    inputs = shape_of(MODEL).residual()
    layers = keep.kept_bytes // 2 - _outside(model)
    # The inputs are held already when a layer's inside is made again.
    assert step.recomputed_bytes == 2 * (layers - 4 * inputs)
    assert step.kept_bytes == 2 * (4 * inputs + _outside(model))
    # While the last layer's inside is remade, the head's tensors have gone; the other layers' inputs have not.
    assert step.peak_saved_bytes <= 4 * inputs + layers // 4 + _outside(model)


def _outside(model: ModelConfig) -> int:
    rows = run_plan(model, keep_plan(4), steps=1).engine.census.rows()
    return sum(nbytes for layer, _, _, nbytes, _ in rows if layer < 0) // 2


def test_layers_share_no_double_count() -> None:
    """Tensors saved twice (the core's output, by attention and by the projection) count once."""
    rows = run_plan(MODEL, keep_plan(4), steps=1).engine.census.rows()
    (output,) = [row for row in rows if row[:2] == (0, "core_attn_out")]
    assert output[3:] == (2 * shape_of(MODEL).sharded(MODEL.query_width), 2)


@pytest.mark.parametrize("kind", OffloadKind)
def test_fifty_steps_grow_nothing(kind: OffloadKind) -> None:
    options = RecomputeOptions(Granularity.selective, modules=["layernorm", "mlp_act", "mlp_fc1"])
    seed = seed_plan(options, OffloadOptions(kind, min_bytes=0), shape_of(MODEL), [range(4)])
    chunk = build(MODEL)
    from memory.engine.engine import MemoryEngine

    engine = MemoryEngine(seed.plan, seed.requests)
    engine.attach([chunk])
    pools = set()
    for step in range(50):
        engine.begin_step()
        chunk(**batch(MODEL, step)).mean().backward()
        engine.end_step()
        assert engine.held_bytes == 0
        pools.add(engine.host_pool_bytes)
    assert len(pools) == 1
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Handle)]


def test_a_forward_without_backward_lets_go_too() -> None:
    seed = seed_plan(
        RecomputeOptions(), OffloadOptions(OffloadKind.layerwise, min_bytes=0), shape_of(MODEL), [range(4)]
    )
    from memory.engine.engine import MemoryEngine

    chunk, engine = build(MODEL), MemoryEngine(seed.plan)
    engine.attach([chunk])
    engine.begin_step()
    loss = chunk(**batch(MODEL, 0)).mean()
    assert engine.held_bytes > 0
    del loss
    assert engine.held_bytes == 0


def test_evaluation_saves_nothing() -> None:
    from memory.engine.engine import MemoryEngine

    chunk, engine = build(MODEL), MemoryEngine(keep_plan(4))
    engine.attach([chunk])
    engine.begin_step()
    chunk.eval()
    with torch.no_grad():
        chunk(**batch(MODEL, 0))
    assert engine.end_step().kept_bytes == 0
    assert engine.census.rows() == []


def test_detach_leaves_the_model_as_it_was() -> None:
    from memory.engine.engine import MemoryEngine

    chunk = build(MODEL)
    plan = seed_plan(
        RecomputeOptions(Granularity.selective, modules=["core_attn", "mlp"]),
        OffloadOptions(),
        shape_of(MODEL),
        [range(4)],
    ).plan
    engine = MemoryEngine(plan)
    engine.attach([chunk])
    engine.detach()
    for module in chunk.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_effects_tell_what_did_nothing_and_why() -> None:
    offload = OffloadOptions(OffloadKind.fine_grained, modules=["qkv_linear", "mlp_act", "core_attn"], min_bytes=3000)
    recompute = RecomputeOptions(Granularity.selective, modules=["layernorm"])
    seed = seed_plan(recompute, offload, shape_of(MODEL), [range(4)])
    effects = {(e.action, e.name): e for e in run_plan(MODEL, seed.plan, seed.requests).engine.effects()}
    tokens = BATCH * MODEL.seq_length
    assert effects[Action.recompute, "layernorm"].bytes == 2 * 4 * 2 * tokens * MODEL.hidden_size * 4
    assert effects[Action.offload, "mlp_act"].layers == 4
    assert effects[Action.offload, "mlp_act"].bytes == 2 * 4 * tokens * 2 * MODEL.ffn * 4
    assert effects[Action.offload, "qkv_linear"].layers == 0
    assert effects[Action.offload, "qkv_linear"].reason == "it is recomputed, so there is nothing to copy"
    assert effects[Action.offload, "core_attn"].bytes == 2 * 4 * 2 * tokens * MODEL.query_width * 4

    small = OffloadOptions(OffloadKind.fine_grained, modules=["attn_proj"], min_bytes=5000)
    seed = seed_plan(RecomputeOptions(), small, shape_of(MODEL), [range(4)])
    (effect,) = run_plan(MODEL, seed.plan, seed.requests, steps=1).engine.effects()
    assert (effect.layers, effect.reason) == (0, "its tensors are smaller than offload.min_bytes=5000")


def _books(plan_bytes: int = 0) -> Books:
    return Books(Ledger(), Census(), EmulatedHostTier(), plan_bytes, "cpu")


@contextmanager
def _through(door: LayerDoor | CountingDoor) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(door.pack, door.unpack):
        yield
    if isinstance(door, LayerDoor):
        door.close()


def test_a_storage_freed_and_its_address_used_again_is_another_tensor() -> None:
    """Keyed by address, the second tensor would be taken for the first: the prototype's silent fault."""
    books = _books()
    plan = LayerPlan(recompute=frozenset({"attn_norm_out"}))
    door = LayerDoor(books, 0, plan, Itinerary(1))
    x = torch.rand(1000, requires_grad=True)
    with _through(door):
        source = x * 1
        gone = source.detach() * 2
        door.name(gone, "attn_norm_out", lambda t: t * 2, source)
        address = gone.data_ptr()
        del gone
        hoard = []
        for _ in range(1000):
            other = torch.rand(1000)
            hoard.append(other)
            if other.data_ptr() == address:
                break
        else:
            pytest.skip("the allocator never gave the address again")
        result = (x * other).sum()
    result.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, other)


def test_parts_of_one_buffer_leave_one_by_one() -> None:
    books = _books()
    door = LayerDoor(books, 0, LayerPlan(offload=frozenset({"query", "value"})), Itinerary(1))
    x = torch.rand(4, 6, requires_grad=True)
    with _through(door):
        buffer = x * 3
        query, value = buffer.split(3, dim=1)
        door.name(query, "query")
        door.name(value, "value")
        result = (query * value).sum()
        del buffer, query, value
    assert books.ledger.held_bytes == 0
    assert books.ledger.offloaded_bytes == x.numel() * 4
    result.backward()
    expected = torch.autograd.grad(((x * 3)[:, :3] * (x * 3)[:, 3:]).sum(), x)[0]
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_views_of_a_whole_offloaded_storage_keep_their_geometry() -> None:
    weight = torch.rand(4, 5)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return (out.t() @ weight).sum() + (out * out).sum() + out[1:, ::2].pow(2).sum()

    door = LayerDoor(_books(), 0, LayerPlan(offload=frozenset({"fc1_out"})), Itinerary(1))
    x = torch.rand(4, 6, requires_grad=True)
    with _through(door):
        out = x * 2
        door.name(out, "fc1_out")
        result = loss(out)
        del out
    result.backward()
    plain = x.detach().requires_grad_()
    assert torch.equal(x.grad, torch.autograd.grad(loss(plain * 2), plain)[0])  # type: ignore[arg-type]


def test_a_chain_recomputes_each_link_once() -> None:
    books = _books()
    plan = LayerPlan(recompute=frozenset({"mlp_norm_out", "fc1_out", "act_out"}), offload=frozenset({"mlp_residual"}))
    door = LayerDoor(books, 0, plan, Itinerary(1))
    calls: list[str] = []

    def link(name: str, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def produce(t: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return t * factor

        return produce

    weights = [torch.rand(50, requires_grad=True) for _ in range(3)]
    residual = torch.rand(50).requires_grad_() * 1
    with _through(door):
        door.name(residual, "mlp_residual")
        norm = residual * 2
        door.name(norm, "mlp_norm_out", link("norm", 2.0), residual)
        fc1 = norm * 3
        door.name(fc1, "fc1_out", link("fc1", 3.0), norm)
        act = fc1 * 4
        door.name(act, "act_out", link("act", 4.0), fc1)
        result = (norm * weights[0] + fc1 * weights[1] + act * weights[2]).sum()
        del norm, fc1, act
    result.backward()
    assert sorted(calls) == ["act", "fc1", "norm"]
    assert torch.equal(weights[2].grad, residual * 2 * 3 * 4)  # type: ignore[arg-type]
    assert books.ledger.recomputed_bytes == 3 * 200


def test_a_module_that_does_not_repeat_itself_is_found_out() -> None:
    door = LayerDoor(_books(), 0, LayerPlan(recompute=frozenset({"act_out"})), Itinerary(1))
    x, w = torch.rand(10).requires_grad_(), torch.rand(10).requires_grad_()
    with _through(door):
        out = x * 2
        door.name(out, "act_out", lambda t: t[:5] * 2, x * 1)
        result = (out * w).sum()
    with pytest.raises(RuntimeError, match="does not repeat itself"):
        result.backward()
