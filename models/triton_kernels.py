"""GPU kernels of our own, where a chain of torch's would go over the same memory time and again. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_BLOCK = 4096


# Triton resolves annotations as its own constants, so there are none but those.
@triton.jit  # type: ignore
def _grad_logits(logits, targets, maxima, sums, scale, vocab, block: tl.constexpr):  # type: ignore
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < vocab
    place = logits + row * vocab + column
    shifted = tl.load(place, mask=inside).to(tl.float32) - tl.load(maxima + row)
    gradient = tl.div_rn(libdevice.exp(shifted), tl.load(sums + row))
    gradient = tl.where(column == tl.load(targets + row), gradient - 1.0, gradient)
    gradient = gradient * tl.load(scale + row)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=inside)


def grad_logits_(
    logits: torch.Tensor, targets: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, scale: torch.Tensor
) -> None:
    """What models.cross_entropy.grad_logits_ makes of fp32 logits, in place of logits of any dtype, in one pass.

    logits [tokens, vocabulary / ranks], contiguous; the others [tokens]. Each operation rounds as torch's own does, so
    the bits are the same (but for fp32 denormals, which are flushed).
    """
    tokens, vocab = logits.shape
    grid = (tokens, triton.cdiv(vocab, _BLOCK))
    # no fused multiply-add: it rounds once where torch rounds twice
    _grad_logits[grid](logits, targets, maxima, sums, scale.contiguous(), vocab, _BLOCK, enable_fp_fusion=False)
