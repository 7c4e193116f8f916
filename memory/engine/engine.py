"""Applies a plan to a built model and keeps the books of what it did."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.engine.attach import Attachment
from memory.engine.census import Census, Effect
from memory.engine.door import Books
from memory.engine.host import EmulatedHostTier, HostTier
from memory.engine.ledger import Ledger, StepBytes
from memory.engine.meter import LinkUse
from memory.plan import Plan
from memory.seed import Request

#: how many layers, or layers' worth of bytes, a tensor's way out may take before the first step waits for it
WINDOW_LAYERS = 1.0


class MemoryEngine:
    """The plan at work on the model chunks of one rank.

    plan None: apply nothing and count what is saved, for engine=megatron, whose own switches act.
    host_bytes, host_limit_bytes: page-locked memory to take before the first step, and at most (GPU only).
    """

    def __init__(
        self, plan: Plan | None, requests: Sequence[Request] = (), *, host_bytes: int = 0, host_limit_bytes: int = 0
    ) -> None:
        self._plan = plan
        self._requests = tuple(requests)
        self._host_bytes, self._host_limit_bytes = host_bytes, host_limit_bytes
        self._ledger = Ledger()
        self.census = Census()
        self._attachments: list[Attachment] = []
        self._modules: list[torch.nn.Module] = []

    def attach(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Wrap the layers of these GPTModels, before or after DDP wraps them.

        Raises MemoryError where the host memory that the plan needs can't be had.
        """
        device = next(chunks[0].parameters()).device
        self._books = Books(
            self._ledger,
            self.census,
            self._host_tier(device),
            self._plan.min_offload_bytes if self._plan else 0,
            device.type,
        )
        self._modules = list(chunks)
        self._attachments = [Attachment(chunk, self._plan, self._books) for chunk in chunks]

    def detach(self) -> None:
        for attachment in self._attachments:
            attachment.detach()
        self._attachments = []

    def switch(self, plan: Plan) -> None:
        """Between steps: go on under another plan. Host memory already taken stays."""
        self.detach()
        self._books.tier.begin_plan()
        self._plan, self._books.min_offload_bytes = plan, plan.min_offload_bytes
        self._attachments = [Attachment(chunk, plan, self._books) for chunk in self._modules]

    def begin_step(self, metered: bool = False) -> None:
        """metered: time this step's copies, for link_use()."""
        self._books.tier.meter.begin_step(metered)
        self._ledger.begin_step()
        self.census.clear()
        # Anew each step: an optimizer may move parameters into buffers of its own after attach().
        self._books.parameters = {
            parameter.untyped_storage()._cdata for module in self._modules for parameter in module.parameters()
        }

    def end_step(self) -> StepBytes:
        return self._ledger.end_step()

    def link_use(self) -> LinkUse:
        """The copies of the last metered step, asked once the device has caught up with it."""
        return self._books.tier.meter.read()

    @property
    def held_bytes(self) -> int:
        """Bytes held for backward now: 0 between steps."""
        return self._ledger.held_bytes

    @property
    def host_pool_bytes(self) -> int:
        return self._books.tier.pool_bytes

    def effects(self) -> list[Effect]:
        """What each requested option did in the last step."""
        return self.census.effects(self._requests)

    def _host_tier(self, device: torch.device) -> HostTier:
        if device.type == "cpu":
            return EmulatedHostTier()
        from memory.engine.cuda_host import CudaHostTier
        from memory.engine.pinned import PinnedPool

        pool = PinnedPool(self._host_limit_bytes)
        pool.reserve(self._host_bytes)
        return CudaHostTier(pool, self._ledger, WINDOW_LAYERS)
