"""Megatron's GPTModel with a loss head of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from models.chunked_loss import chunked_cross_entropy
from models.config import LossHead
from models.in_place_loss import in_place_cross_entropy


class LossOutputLayer(ColumnParallelLinear):
    """The output layer, which given labels goes on to their loss.

    A module's call, since hooks that gather its weight just in time (overlap_param_gather) hang on that.
    """

    cross_entropy: Callable[..., torch.Tensor]

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, as Megatron's; or with labels [s, b] the loss of each token, [s, b] in fp32. And no bias."""
        if labels is None:
            logits: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_, weight, runtime_gather_output)
            return logits
        losses = self.cross_entropy(
            input_,
            self.weight if weight is None else weight,
            labels,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
        )
        return losses, None


class ChunkedOutputLayer(LossOutputLayer):
    cross_entropy = staticmethod(chunked_cross_entropy)


class InPlaceOutputLayer(LossOutputLayer):
    cross_entropy = staticmethod(in_place_cross_entropy)


class LossHeadGPT(GPTModel):
    """GPTModel that computes losses by a head of ours; without labels it returns all logits, as Megatron's does."""

    output_layers: ClassVar = {LossHead.chunked: ChunkedOutputLayer, LossHead.in_place: InPlaceOutputLayer}

    def __init__(self, *args: Any, loss_head: LossHead, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            # Turned into ours rather than replaced by it, so that the weights are drawn as for the full head.
            self.output_layer.__class__ = self.output_layers[loss_head]

    def _postprocess(self, hidden_states: torch.Tensor, *, labels: torch.Tensor | None = None, **others: Any) -> Any:
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        losses, _ = self.output_layer(hidden_states, weight=weight, labels=labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()
