"""Which loss head a GPT has, and the bytes that each kind takes. Imports no torch.

The head is the output layer and the cross entropy over the vocabulary. `full` is Megatron's: the softmax of all tokens,
in fp32, waits for backward. `in_place` (models/in_place_loss.py) keeps the logits in the weight's dtype instead, and
makes their gradient in their place. `chunked` (models/chunked_loss.py) keeps the head's input alone and makes the
logits again in backward, which is one matrix product more beside the head's three.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import LossHead, ModelConfig

#: of the fp32 logits that the chunked head has at one time: large enough for matrix products at full speed
CHUNK_BYTES = 512 << 20

#: chunks are multiples of this many tokens, or rows of the output weight
_GRAIN = 128

_FP32 = 4

#: fields of TransformerConfig that change Megatron's own head, which the chunked one does not follow
_OTHER_HEADS = ("cross_entropy_loss_fusion", "defer_embedding_wgrad_compute", "use_mup")


def chunk_length(across: int) -> int:
    """Length of one side of a piece of the tokens x vocabulary plane that is `across` along the other."""
    return max(_GRAIN, CHUNK_BYTES // (_FP32 * across) // _GRAIN * _GRAIN)


def resolve_loss_head(model: ModelConfig, stock: bool = False) -> LossHead:
    """What model.loss_head means: for `auto` in_place, unless model.extras ask for another head, or the model is stock:
    built of Megatron's own layers.

    Raises ValueError where a head of ours is asked for beside a field of model.extras that asks for yet another.
    """
    other = next((name for name in _OTHER_HEADS if model.extras.get(name)), None)
    if model.loss_head is LossHead.auto:
        return LossHead.full if other or stock else LossHead.in_place
    if model.loss_head is not LossHead.full and other:
        raise ValueError(
            f"model.loss_head={model.loss_head.value}: does not go with model.extras.{other}; use model.loss_head=full"
        )
    return model.loss_head


@dataclass(frozen=True)
class HeadBytes:
    """Device bytes of a loss head for one micro-batch on one rank of the last pipeline stage."""

    #: from its forward to its backward, its input included
    kept: int
    #: the most beside that in either of them, the gradients of its input and of its weight included
    transient: int


def head_bytes(
    head: LossHead,
    *,
    tokens: int,
    hidden: int,
    padded_vocab: int,
    element_bytes: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> HeadBytes:
    """Closed form of a resolved head. tokens: of a micro-batch on this rank, before sequence parallelism splits them.

    Vectors of one number a token count among what is kept, not among what is transient.
    """
    vocab = padded_vocab // tensor_parallel
    gathers = sequence_parallel and tensor_parallel > 1
    whole = tokens * hidden * element_bytes
    held = whole // tensor_parallel if gathers else whole
    # The input gathered over ranks, and its gradient scattered over them.
    gathered = whole + held if gathers else 0
    weight = vocab * hidden * element_bytes
    #: of one logit in the weight's dtype beside its fp32 twin; in fp32 they are one tensor
    beside = element_bytes if element_bytes < _FP32 else 0
    if head is LossHead.full:
        logits = tokens * vocab
        # The gradient of the logits is made in place of the softmax, which goes before the products are computed.
        products = logits * (element_bytes - _FP32) + weight + whole
        # softmax, target mask (bool) and target (int64)
        return HeadBytes(held + tokens * (_FP32 * vocab + 1 + 8), gathered + max(logits * beside, products))
    # labels (int64), maximum and sum of exponentials (fp32)
    held += tokens * (8 + 2 * _FP32)
    if head is LossHead.in_place:
        chunk = min(chunk_length(vocab), tokens) * vocab * _FP32
        return HeadBytes(held + tokens * vocab * element_bytes, gathered + max(chunk, weight + whole))
    rows = min(chunk_length(tokens), vocab)
    forward = min(chunk_length(vocab), tokens) * vocab * (_FP32 + beside)
    piece = tokens * rows
    total = tokens * hidden * _FP32
    making = piece * (_FP32 + beside) + (total if rows < vocab else 0)
    adding = piece * element_bytes + whole + (total if rows < vocab or beside else 0)
    return HeadBytes(held, gathered + max(forward, weight + max(making, adding)))
