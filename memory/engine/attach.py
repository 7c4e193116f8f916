"""Finds the sites of a Megatron transformer layer and routes what it saves through the door.

Works on the attributes of megatron.core's TransformerLayer, SelfAttention and MLP; instances are patched, classes are
not, and detach() undoes it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from memory.engine.door import Books, CountingDoor, LayerDoor
from memory.engine.itinerary import Itinerary
from memory.engine.regions import run_region
from memory.plan import Action, LayerPlan, Plan


class Attachment:
    """One model chunk (a pipeline stage's GPTModel) under a plan."""

    def __init__(self, chunk: Any, plan: Plan | None, books: Books) -> None:
        self._books = books
        self._undo: list[Callable[[], None]] = []
        #: the door of the layer now running forward
        self._door: LayerDoor | None = None
        self._reload_ahead = plan.reload_ahead if plan else 0
        #: of the micro-batch now running forward
        self._itinerary = Itinerary(0, books.tier.begin_backward)
        self._patch(chunk, self._run_chunk)
        if plan:
            layers = list(chunk.decoder.layers)
            for index, layer in enumerate(layers):
                self._attach_layer(plan, layer, layers[index:])

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _patch(self, module: Any, wrapper: Callable[..., Any], *bound: Any) -> None:
        original = module.forward
        module.forward = lambda *args, **kwargs: wrapper(original, *bound, *args, **kwargs)
        self._undo.append(lambda: delattr(module, "forward"))

    def _hook(self, module: Any, before: Callable[..., None] | None, after: Callable[..., None] | None) -> None:
        if before:
            self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        if after:
            self._undo.append(module.register_forward_hook(after, with_kwargs=True).remove)

    def _run_chunk(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        itinerary = self._itinerary = Itinerary(self._reload_ahead, self._books.tier.begin_backward)
        outside = CountingDoor(
            self._books,
            on_save=lambda nbytes: self._books.census.add(-1, "outside the layers", Action.keep, nbytes),
            on_read=itinerary.begin_backward,
        )
        with torch.autograd.graph.saved_tensors_hooks(outside.pack, outside.unpack):
            return original(*args, **kwargs)

    def _attach_layer(self, whole: Plan, layer: Any, following: Sequence[Any]) -> None:
        """following: this layer and those after it, not yet attached."""
        number = layer.layer_number - 1
        plan, span = whole.layers[number], whole.span_of(number)
        if span is None:
            self._patch(layer, self._run_layer, number, plan)
            self._name_sites(layer)
            self._attach_regions(number, layer, plan)
        elif number == span[0]:
            members = [member.forward for member in following[: span[1] - span[0]]]
            self._patch(layer, self._run_span, number, plan, members, whole.distribute_saved_activations)
        else:
            self._patch(layer, _pass_through)

    def _open(self, number: int, plan: LayerPlan, default_site: str) -> LayerDoor:
        return LayerDoor(self._books, number, plan, self._itinerary, default_site)

    def _run_layer(
        self,
        original: Callable[..., Any],
        number: int,
        plan: LayerPlan,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled():
            return original(hidden_states, *args, **kwargs)
        door = self._door = self._open(number, plan, "rest")
        door.name(hidden_states, "layer_input")
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                door.share(value)
        try:
            with torch.autograd.graph.saved_tensors_hooks(door.pack, door.unpack):
                return original(hidden_states, *args, **kwargs)
        finally:
            self._door = None
            door.close()
            self._books.tier.leave_layer()

    def _run_span(
        self,
        original: Callable[..., Any],
        number: int,
        plan: LayerPlan,
        members: Sequence[Callable[..., Any]],
        distribute: bool,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (torch.is_grad_enabled() and hidden_states.requires_grad):
            return original(hidden_states, *args, **kwargs)

        def run(hidden: torch.Tensor) -> torch.Tensor:
            for member in members:
                hidden = member(hidden, *args, **kwargs)[0]
            return hidden

        # Nothing but the region's input is saved here; sharded over TP ranks it is a storage that nobody named.
        door = self._open(number, plan, "layer_input")
        try:
            with torch.autograd.graph.saved_tensors_hooks(door.pack, door.unpack):
                output = run_region(
                    run,
                    hidden_states,
                    books=self._books,
                    on_remake=lambda nbytes: self._books.census.add(number, "layer", Action.recompute, nbytes),
                    distribute=distribute,
                )
        finally:
            door.close()
            self._books.tier.leave_layer()
        return output, kwargs.get("context")

    def _name_sites(self, layer: Any) -> None:
        self._name_norm(layer.input_layernorm, "layer_input", "attn_norm_out")
        self._name_norm(layer.pre_mlp_layernorm, "mlp_residual", "mlp_norm_out")
        self._hook(layer.self_attention.core_attention, self._enter_core, self._leave_core)
        mlp = layer.mlp
        self._hook(mlp.linear_fc1, None, self._namer("fc1_out", lambda x: mlp.linear_fc1.forward(x)[0]))
        self._hook(mlp.activation, None, self._name_activation)

    def _name_norm(self, norm: Any, source: str, output: str) -> None:
        if isinstance(norm, IdentityOp):
            return
        self._hook(norm, self._source_namer(source), self._namer(output, norm.forward))

    def _source_namer(self, site: str) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._door:
                self._door.name(_first(args, kwargs), site)

        return before

    def _namer(self, site: str, produce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
        def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._door:
                tensor = output[0] if isinstance(output, tuple) else output
                self._door.name(tensor, site, produce, _first(args, kwargs))

        return after

    def _name_activation(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> None:
        if self._door:
            source, *others = args
            self._door.name(output, "act_out", lambda x: module.forward(x, *others, **kwargs), source)

    def _enter_core(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._door:
            self._door.enter_core(*args[:3])

    def _leave_core(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._door:
            self._door.leave_core(output[0] if isinstance(output, tuple) else output)

    def _attach_regions(self, number: int, layer: Any, plan: LayerPlan) -> None:
        if "core_attn" in plan.regions:
            self._patch(layer.self_attention.core_attention, self._run_core_region, number)
        if "mlp" in plan.regions:
            self._patch(layer.mlp, self._run_mlp_region, number)

    def _run_core_region(
        self,
        original: Callable[..., Any],
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return original(query, key, value, *args, **kwargs)
        return run_region(
            lambda q, k, v: original(q, k, v, *args, **kwargs),
            query,
            key,
            value,
            books=self._books,
            on_remake=lambda nbytes: self._books.census.add(number, "core_attn", Action.recompute, nbytes),
        )

    def _run_mlp_region(
        self, original: Callable[..., Any], number: int, hidden_states: torch.Tensor, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return original(hidden_states, **kwargs)
        # The bias goes around: a parameter that a checkpoint returns becomes part of its graph and recurses without
        # end in backward (Megatron's own mlp recompute does, 0.16.1 and 0.19.2).
        bias: torch.Tensor | None = None

        def run(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal bias
            output, bias = original(hidden, **kwargs)
            return output

        output = run_region(
            run,
            hidden_states,
            books=self._books,
            on_remake=lambda nbytes: self._books.census.add(number, "mlp", Action.recompute, nbytes),
        )
        return output, bias


def _pass_through(original: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer that the head of its span has already run."""
    if not (torch.is_grad_enabled() and hidden_states.requires_grad):
        return original(hidden_states, *args, **kwargs)
    return hidden_states, kwargs.get("context")


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(tensor, torch.Tensor)
    return tensor
