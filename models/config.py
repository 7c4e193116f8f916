"""What a GPT is made of, as plain data. Importing this module imports neither torch nor Megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, Optional


class Normalization(Enum):
    rmsnorm = "RMSNorm"
    layernorm = "LayerNorm"


class Activation(Enum):
    swiglu = "swiglu"
    gelu = "gelu"


class Position(Enum):
    rope = "rope"
    learned = "learned_absolute"


class Attention(Enum):
    """auto: te where Transformer Engine and a GPU are there, else sdpa."""

    auto = "auto"
    sdpa = "sdpa"
    unfused = "unfused"
    te = "te"


class LossHead(Enum):
    """Output layer and cross entropy; models/loss_head.py has what each holds.

    full: Megatron's. in_place: the same bits, a third of the bytes. chunked: hardly any bytes, and the logits computed
    twice. auto: in_place; full where model.extras or engine=megatron ask for a head of Megatron's.
    """

    auto = "auto"
    full = "full"
    in_place = "in_place"
    chunked = "chunked"


@dataclass(frozen=True)
class ModelConfig:
    """Shape and kind of a GPT. Names follow Megatron's TransformerConfig where it has one."""

    name: str = "custom"
    num_layers: int = 4
    hidden_size: int = 128
    #: width of the MLP after its activation; None: 4 x hidden_size
    ffn_hidden_size: Optional[int] = None
    num_attention_heads: int = 4
    #: key/value heads (GQA); None: one a query head
    num_query_groups: Optional[int] = None
    #: head width; None: hidden_size / num_attention_heads
    kv_channels: Optional[int] = None
    seq_length: int = 128
    #: None: the tokenizer's
    vocab_size: Optional[int] = None
    #: embedding rows are padded to a multiple of this times the tensor-parallel size
    make_vocab_size_divisible_by: int = 128
    normalization: Normalization = Normalization.rmsnorm
    layernorm_epsilon: float = 1e-5
    activation: Activation = Activation.swiglu
    position: Position = Position.rope
    rotary_base: int = 10000
    #: Llama-3.1 style frequency scaling (Megatron: rope_scaling_factor); None: off
    rope_scaling_factor: Optional[float] = None
    tied_embeddings: bool = False
    #: biases of the linear layers (Megatron: add_bias_linear)
    bias: bool = False
    qkv_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    attention: Attention = Attention.auto
    #: output layer and loss: full keeps tokens x vocabulary in fp32 for backward, in_place the same bits in bf16;
    #: chunked makes them again piece by piece
    loss_head: LossHead = LossHead.auto
    #: further fields of Megatron's TransformerConfig, checked against it by name
    extras: Dict[str, Any] = field(default_factory=dict)
    #: the name under which an installed package registers a builder (entry points megafit.builders); None: ours
    builder: Optional[str] = None
    #: what to pass to that builder, checked against its parameters
    builder_extras: Dict[str, Any] = field(default_factory=dict)

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def query_width(self) -> int:
        return self.head_dim * self.num_attention_heads

    @property
    def kv_width(self) -> int:
        return self.head_dim * self.query_groups

    @property
    def gated(self) -> bool:
        return self.activation is Activation.swiglu

    def padded_vocab_size(self, vocab_size: int, tensor_parallel: int = 1) -> int:
        """Rows of the embedding table: vocab_size rounded up as Megatron rounds it (vocab_size_with_padding)."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Sizes of Megatron's parallel groups, as far as a model's construction depends on them."""

    tensor: int = 1
    pipeline: int = 1
    #: model chunks per pipeline stage; None: one
    virtual_pipeline: Optional[int] = None
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    overlap_p2p_comm: bool = False
