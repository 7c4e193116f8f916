"""Our loss heads against Megatron's own: losses, gradients, and the bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memory.engine.engine import MemoryEngine
from memory.plan import keep_plan
from models import loss_head
from models.config import Activation, Attention, LossHead, ModelConfig
from models.loss_head import CHUNK_BYTES, chunk_length, head_bytes, resolve_loss_head

VOCAB = 300
#: with the least chunks, 128 of either: the last of three is smaller in both directions
SEQUENCES, LENGTH = 2, 150
TOKENS = SEQUENCES * LENGTH
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_query_groups=2,
    seq_length=LENGTH,
    attention=Attention.unfused,
    make_vocab_size_divisible_by=100,
)
LLAMA_8B = ModelConfig(
    loss_head=LossHead.auto, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8
)
GPT2 = ModelConfig(loss_head=LossHead.auto, hidden_size=768, num_attention_heads=12, activation=Activation.gelu)

OURS = [LossHead.chunked, LossHead.in_place]

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="exact on the CPU only: kernels differ by shape on a GPU")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_BYTES", 1)


def batch(vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).expand(SEQUENCES, -1),
        "attention_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None],
    }


def weights(*shape: int) -> torch.Tensor:
    """Each token its own, some none, as a loss mask and a mean give them."""
    drawn = torch.rand(*shape, generator=torch.Generator().manual_seed(3))
    return drawn * (drawn > 0.2) / drawn.numel()


def run(gpt: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of each token, and all gradients of their weighted sum."""
    losses = gpt(**batch())
    (losses * weights(SEQUENCES, LENGTH)).sum().backward()
    return losses.detach(), {name: parameter.grad for name, parameter in gpt.named_parameters()}


def both(
    build: Callable[..., Any], model: ModelConfig, ours: LossHead = LossHead.chunked, **options: Any
) -> tuple[Any, Any]:
    theirs, other = (
        build(replace(model, loss_head=head), vocab_size=VOCAB, **options) for head in (LossHead.full, ours)
    )
    assert type(theirs) is not type(other)
    return theirs, other


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("asked", LossHead)
def test_resolution(asked: LossHead) -> None:
    expected = LossHead.in_place if asked is LossHead.auto else asked
    assert resolve_loss_head(replace(MODEL, loss_head=asked)) is expected


@pytest.mark.parametrize("field", ["cross_entropy_loss_fusion", "use_mup"])
def test_another_head_by_extras_is_left_to_megatron(field: str) -> None:
    model = replace(MODEL, extras={field: True})
    assert resolve_loss_head(model) is LossHead.full
    assert resolve_loss_head(replace(model, extras={field: False})) is LossHead.in_place
    for head in (LossHead.in_place, LossHead.chunked):
        with pytest.raises(ValueError, match=rf"model\.loss_head={head.value}: .*model\.extras\.{field}"):
            resolve_loss_head(replace(model, loss_head=head))


def test_chunks_are_whole_grains_within_their_bytes() -> None:
    assert chunk_length(128256) == 1024
    assert chunk_length(16384) == 8192
    assert chunk_length(1 << 40) == 128


def test_auto_is_resolved_when_a_model_is_built(build: Callable[..., Any]) -> None:
    stock, ours = (build(MODEL, vocab_size=VOCAB, stock_spec=stock).output_layer for stock in (True, False))
    assert [type(layer).__name__ for layer in (stock, ours)] == ["ColumnParallelLinear", "InPlaceOutputLayer"]


@on_cpu
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("head", "chunk_bytes"),
    [(LossHead.chunked, CHUNK_BYTES), (LossHead.in_place, CHUNK_BYTES), (LossHead.in_place, 1)],
)
def test_bitwise_megatrons(
    head: LossHead, chunk_bytes: int, tied: bool, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunked head in one chunk; the one in place however many."""
    monkeypatch.setattr(loss_head, "CHUNK_BYTES", chunk_bytes)
    full, other = both(build, replace(MODEL, tied_embeddings=tied), head)
    losses, gradients = run(full)
    our_losses, our_gradients = run(other)
    assert torch.equal(our_losses, losses)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(our_gradients[name], gradient), name
        assert gradient.abs().sum() > 0, name


@on_cpu
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_change_rounding_only(tied: bool, build: Callable[..., Any], small_chunks: None) -> None:
    full, chunked = both(build, replace(MODEL, tied_embeddings=tied))
    losses, gradients = run(full)
    our_losses, our_gradients = run(chunked)
    torch.testing.assert_close(our_losses, losses, rtol=1e-6, atol=0)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative(our_gradients[name], gradient) < 1e-6, name


@on_cpu
def test_in_place_goes_backward_once(build: Callable[..., Any]) -> None:
    gpt = build(replace(MODEL, loss_head=LossHead.in_place), vocab_size=VOCAB)
    loss = gpt(**batch()).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"model\.loss_head=full"):
        loss.backward()


@on_cpu
@pytest.mark.parametrize("head", OURS)
def test_weights_keys_and_logits_are_those_of_the_full_head(head: LossHead, build: Callable[..., Any]) -> None:
    full, other = both(build, MODEL, head)
    theirs, ours = full.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if theirs[name] is not None)
    without = {name: value for name, value in batch().items() if name != "labels"}
    logits = other(**without)
    assert logits.shape == (SEQUENCES, LENGTH, VOCAB)
    assert torch.equal(logits, full(**without))


@on_cpu
def test_evaluation_makes_no_logits_of_all_tokens(build: Callable[..., Any], small_chunks: None) -> None:
    full, chunked = (gpt.eval() for gpt in both(build, MODEL))
    with torch.no_grad(), Allocations() as whole:
        losses = full(**batch())
    with torch.no_grad(), Allocations() as pieces:
        ours = chunked(**batch())
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)
    assert not ours.requires_grad
    logits = (TOKENS, VOCAB)
    assert logits in whole.planes and logits not in pieces.planes
    assert (128, VOCAB) in pieces.planes and (44, VOCAB) in pieces.planes


@on_cpu
@pytest.mark.parametrize("head", OURS)
def test_a_gradient_comes_once_and_gathers_over_micro_batches(
    head: LossHead, build: Callable[..., Any], small_chunks: None
) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    gathered = []
    for gpt in both(build, replace(MODEL, tied_embeddings=True), head):
        arrivals: list[torch.Size] = []
        embedding = gpt.embedding.word_embeddings.weight
        embedding.register_hook(lambda gradient, arrivals=arrivals: arrivals.append(gradient.shape))
        # Overlapped, Megatron refuses a gradient that is announced twice in one backward, or that is None.
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        wrapped = DistributedDataParallel(config=gpt.config, ddp_config=options, module=gpt)
        with wrapped.no_sync():
            (wrapped(**batch()) * weights(SEQUENCES, LENGTH)).sum().backward()
        (wrapped(**batch()) * weights(SEQUENCES, LENGTH)).sum().backward()
        wrapped.finish_grad_sync()
        assert arrivals == [(VOCAB, MODEL.hidden_size)] * 2
        gathered.append({name: parameter.main_grad.clone() for name, parameter in gpt.named_parameters()})
    full, ours = gathered
    for name, gradient in full.items():
        assert relative(ours[name], gradient) < 1e-6, name


@on_cpu
@pytest.mark.parametrize("head", OURS)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str, head: LossHead, small_chunks: None) -> None:
    ours, theirs = _inputs(torch.float32), _inputs(torch.float32)
    for kind, tensors in ((head, ours), (LossHead.full, theirs)):
        for name, tensor in tensors.items():
            tensor.requires_grad_(name != frozen)
        _head(kind, tensors).sum().backward()
    assert ours.pop(frozen).grad is None
    ((name, tensor),) = ours.items()
    expected = theirs[name].grad
    assert tensor.grad is not None and expected is not None
    assert relative(tensor.grad, expected) < 1e-6


@on_cpu
@pytest.mark.parametrize("head", OURS)
@pytest.mark.parametrize("pieces", ["one", "several"])
def test_bf16(pieces: str, head: LossHead, request: pytest.FixtureRequest) -> None:
    """Megatron's bits; chunked in several: no further from the fp32 gradients than Megatron's are, or hardly."""
    if pieces == "several":
        request.getfixturevalue("small_chunks")
    results = {}
    for label, kind, dtype in [
        ("exact", LossHead.full, torch.float32),
        ("full", LossHead.full, torch.bfloat16),
        ("ours", head, torch.bfloat16),
    ]:
        # The same numbers, all of which bf16 can hold.
        tensors = {name: t.to(dtype).requires_grad_() for name, t in _inputs(torch.bfloat16).items()}
        losses = _head(kind, tensors)
        assert losses.dtype is torch.float32
        (losses * weights(*losses.shape)).sum().backward()
        results[label] = (losses.detach(), *(tensor.grad for tensor in tensors.values()))
    for exact, full, ours in zip(*results.values(), strict=True):
        assert ours.dtype is full.dtype
        if pieces == "one" or head is LossHead.in_place:
            assert torch.equal(ours, full)
        assert relative(ours.float(), exact) < 1.2 * relative(full.float(), exact)


@on_cpu
@pytest.mark.parametrize(
    ("ours", "saves"), [(LossHead.chunked, TOKENS * (4 * VOCAB + 9 - 16)), (LossHead.in_place, TOKENS * (9 - 16))]
)
@pytest.mark.parametrize("tied", [False, True])
def test_kept_bytes_are_what_the_memory_engine_counts(
    ours: LossHead, saves: int, tied: bool, build: Callable[..., Any], small_chunks: None
) -> None:
    counted, expected = [], []
    model = replace(MODEL, tied_embeddings=tied)
    for gpt, head in zip(both(build, model, ours), (LossHead.full, ours), strict=True):
        engine = MemoryEngine(keep_plan(model.num_layers))
        engine.attach([gpt])
        engine.begin_step()
        gpt(**batch()).mean().backward()
        engine.end_step()
        assert engine.held_bytes == 0
        counted.append(sum(nbytes for layer, _, _, nbytes, _ in engine.census.rows() if layer < 0))
        expected.append(
            head_bytes(head, tokens=TOKENS, hidden=model.hidden_size, padded_vocab=VOCAB, element_bytes=4).kept
        )
    # What the two share (embedding, final norm) cancels out, and so does the head's input.
    assert counted[0] - counted[1] == expected[0] - expected[1] == saves


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", [LossHead.full, *OURS])
@pytest.mark.parametrize("pieces", ["one", "several"])
def test_bytes_are_the_closed_form(
    head: LossHead, dtype: torch.dtype, pieces: str, request: pytest.FixtureRequest
) -> None:
    if pieces == "several":
        request.getfixturevalue("small_chunks")
    tensors = {name: tensor.requires_grad_() for name, tensor in _inputs(dtype).items()}
    shape: dict[str, Any] = {"tokens": TOKENS, "hidden": MODEL.hidden_size, "padded_vocab": VOCAB}
    expected = head_bytes(head, **shape, element_bytes=dtype.itemsize)
    with Allocations() as seen:
        losses = _head(head, tensors)
        seen.settle()
        # The head's input is no allocation of its own here; the losses go out.
        assert seen.live_bytes == expected.kept - _nbytes(tensors["hidden"]) + _nbytes(losses)
        losses.sum().backward()
    transient = seen.peak_bytes - (expected.kept - _nbytes(tensors["hidden"]))
    # Vectors of one number a token, which come and go, are not in it.
    assert abs(transient - expected.transient) <= (40 if head is LossHead.in_place else 32) * TOKENS


def test_sequence_parallel_bytes() -> None:
    shape: dict[str, Any] = {
        "tokens": 1000,
        "hidden": 10,
        "padded_vocab": 1000,
        "element_bytes": 2,
        "tensor_parallel": 2,
    }
    for head in (LossHead.full, *OURS):
        plain, split = (head_bytes(head, **shape, sequence_parallel=on) for on in (False, True))
        assert plain.kept - split.kept == 10_000
        # gathered, and scattered again
        assert split.transient - plain.transient == 20_000 + 10_000


def test_llama_head_in_bytes() -> None:
    shape: dict[str, Any] = {"tokens": 16384, "hidden": 4096, "padded_vocab": 128256, "element_bytes": 2}
    gib = 1 << 30
    full, chunked, in_place = (head_bytes(head, **shape) for head in (LossHead.full, *OURS))
    assert (in_place.kept / gib, in_place.transient / gib) == pytest.approx((4.04, 1.10), abs=0.01)
    assert (full.kept / gib, full.transient / gib) == pytest.approx((7.95, 3.91), abs=0.01)
    assert (chunked.kept / gib, chunked.transient / gib) == pytest.approx((0.125, 1.98), abs=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_at_a_vocabulary_of_128k(build: Callable[..., Any], loss_of: Callable[..., torch.Tensor]) -> None:
    """Bytes and bits of forward and backward of a whole model, which its head dominates.

    In place: those of the full head. Chunked: a sum over pieces of the vocabulary, each rounded to bf16 where the full
    head rounds once, so no bits; but no further from fp32 than the full head is, or hardly.
    """
    model = ModelConfig(
        num_layers=1, hidden_size=1024, num_attention_heads=8, seq_length=4096, attention=Attention.sdpa
    )
    vocab, tokens = 128256, 2 * 4096
    shape: dict[str, Any] = {"tokens": tokens, "hidden": model.hidden_size, "padded_vocab": vocab, "element_bytes": 2}
    peaks, losses, gradients = {}, {}, {}
    for label, head, bf16 in [
        ("exact", LossHead.full, False),
        *((head, head, True) for head in (LossHead.full, *OURS)),
    ]:
        gpt = build(replace(model, loss_head=head), vocab_size=vocab, bf16=bf16)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.copy_(parameter.bfloat16())
        gpt = gpt.bfloat16() if bf16 else gpt
        loss_of(gpt, sequences=2, length=4096, vocab_size=vocab).backward()  # workspaces and gradients are there now
        for parameter in gpt.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = loss_of(gpt, sequences=2, length=4096, vocab_size=vocab)
        loss.backward()
        torch.cuda.synchronize()
        peaks[label] = torch.cuda.max_memory_allocated() - before
        losses[label] = loss.item()
        gradients[label] = {name: parameter.grad.float().cpu() for name, parameter in gpt.named_parameters()}
        del gpt, loss
    sizes = {head: head_bytes(head, **shape) for head in (LossHead.full, *OURS)}
    for head in OURS:
        saved = sum(getattr(sizes[LossHead.full], part) - getattr(sizes[head], part) for part in ("kept", "transient"))
        assert saved > 3 << 30
        # Beside the heads: one layer, which either peak may or may not meet.
        assert peaks[LossHead.full] - peaks[head] == pytest.approx(saved, abs=1 << 29)
    assert losses[LossHead.in_place] == losses[LossHead.full]
    assert losses[LossHead.chunked] == pytest.approx(losses[LossHead.full], rel=1e-5)
    for name, full in gradients[LossHead.full].items():
        assert torch.equal(gradients[LossHead.in_place][name], full), name
        exact = gradients["exact"][name]
        assert relative(gradients[LossHead.chunked][name], exact) < 1.5 * relative(full, exact), name


def _inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(LENGTH, SEQUENCES, MODEL.hidden_size, generator=generator)
    weight = torch.randn(VOCAB, MODEL.hidden_size, generator=generator) / 8
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}


def _labels() -> torch.Tensor:
    return torch.randint(0, VOCAB, (LENGTH, SEQUENCES), generator=torch.Generator().manual_seed(6))


def _head(head: LossHead, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of each token, [s, b], by the head alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        linear_with_grad_accumulation_and_async_allreduce,
        vocab_parallel_cross_entropy,
    )

    from models.gpt import LossHeadGPT

    group = parallel_state.get_tensor_model_parallel_group()
    if head is not LossHead.full:
        ours: torch.Tensor = LossHeadGPT.output_layers[head].cross_entropy(
            tensors["hidden"], tensors["weight"], _labels(), group=group, sequence_parallel=False
        )
        return ours
    logits = linear_with_grad_accumulation_and_async_allreduce(
        input=tensors["hidden"],
        weight=tensors["weight"],
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=group,
    )
    losses: torch.Tensor = vocab_parallel_cross_entropy(logits, _labels())
    return losses


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators return, while they live; and the shapes that they came in."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        #: leading dimensions flattened
        self.planes: set[tuple[int, int]] = set()

    @property
    def live_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._live.values())

    def settle(self) -> None:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        self.settle()
        for storage in _storages(result):
            if storage._cdata not in given:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel():
                self.planes.add((tensor.numel() // tensor.size(-1), tensor.size(-1)))
        return result


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()
