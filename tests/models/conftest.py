from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from models import cpu
from models.config import ModelConfig


@pytest.fixture(scope="module", autouse=True)
def parallel_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's process groups in a world of one."""
    if not torch.cuda.is_available():
        cpu.install()
    from megatron.core import parallel_state

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    meeting = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    torch.distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def build() -> Callable[..., Any]:
    """build(model, vocab_size=256, **of build_gpt, seed=1): the model of a world of one, its weights by the seed."""

    def _build(
        model: ModelConfig, *, vocab_size: int = 256, seed: int = 1, stock_spec: bool = False, **config: Any
    ) -> Any:
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        from models.builder import build_gpt, transformer_config

        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        (chunk,) = build_gpt(model, transformer_config(model, **config), vocab_size=vocab_size, stock_spec=stock_spec)
        return chunk

    return _build


@pytest.fixture
def loss_of() -> Callable[..., torch.Tensor]:
    """loss_of(model, sequences, vocab_size=256): mean loss on the same random tokens each time, graph attached."""

    def _loss(gpt: torch.nn.Module, *, sequences: int = 2, length: int = 16, vocab_size: int = 256) -> torch.Tensor:
        tokens = torch.randint(0, vocab_size, (sequences, length + 1), generator=torch.Generator().manual_seed(7))
        tokens = tokens.to(next(gpt.parameters()).device)
        positions = torch.arange(length, device=tokens.device).expand(sequences, -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        loss: torch.Tensor = gpt(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        return loss

    return _loss
