from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not GPU:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def parallel_groups() -> Iterator[None]:
    if not GPU:
        yield
        return
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
