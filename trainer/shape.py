"""What a configuration makes of one layer and of the layers' place in the pipeline. Imports no torch."""

from __future__ import annotations

from memory.sites import LayerShape
from models.config import Attention, LossHead
from models.loss_head import HeadBytes, head_bytes, resolve_loss_head
from trainer.config.schema import Config, Engine, Precision


def layer_chunks(
    num_layers: int, pipeline: int = 1, virtual_pipeline: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The layers of each model chunk in forward order, as Megatron deals them out: stage by stage, then round again."""
    count = num_layers // (pipeline * (virtual_pipeline or 1))
    return tuple(tuple(range(first, first + count)) for first in range(0, num_layers, count))


def layer_shape(config: Config, has_cuda: bool) -> LayerShape:
    """Sizes of one layer on one rank for one micro-batch."""
    model, parallel = config.model, config.parallel
    # Without a GPU torch's scaled_dot_product_attention takes its plain path for dropout, and that stores the scores.
    stores_scores = model.attention is Attention.unfused or (model.attention_dropout > 0 and not has_cuda)
    return LayerShape(
        seq_length=model.seq_length,
        micro_batch_size=config.trainer.micro_batch_size,
        hidden=model.hidden_size,
        ffn=model.ffn,
        heads=model.num_attention_heads,
        query_width=model.query_width,
        kv_width=model.kv_width,
        gated=model.gated,
        fused_attention=not stores_scores,
        element_bytes=2 if uses_bf16(config.trainer.precision, has_cuda) else 4,
        tensor_parallel=parallel.tensor,
        context_parallel=parallel.context,
        sequence_parallel=parallel.sequence_parallel,
    )


def loss_head(config: Config) -> LossHead:
    return resolve_loss_head(config.model, stock=config.engine.name is Engine.megatron)


def loss_head_bytes(config: Config, shape: LayerShape, padded_vocab: int) -> HeadBytes:
    """Of one micro-batch on a rank of the last pipeline stage."""
    return head_bytes(
        loss_head(config),
        tokens=shape.tokens,
        hidden=config.model.hidden_size,
        padded_vocab=padded_vocab,
        element_bytes=shape.element_bytes,
        tensor_parallel=config.parallel.tensor,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def uses_bf16(precision: Precision, has_cuda: bool) -> bool:
    return has_cuda if precision is Precision.auto else precision is Precision.bf16


def plans_for_gpu(config: Config, has_cuda: bool) -> bool:
    """Whether to plan for a GPU: there is one, or a laptop plans for the one that the hardware group names."""
    return has_cuda or config.hardware.name not in ("auto", "cpu")
