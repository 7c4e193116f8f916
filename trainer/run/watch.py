"""A closer look every so many steps: all ranks, where memory goes, the link, and the plan against its baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from memory.plan import Plan
from models.flops import flops_per_token
from trainer.config.schema import Config, GuardAction
from trainer.report.baseline import WARM_UP_STEPS, Choice, Delta, delta
from trainer.report.guard import advise
from trainer.report.observation import freed_shares, observe
from trainer.report.observer import Advice, Copies, Interval, RankUse, StepRecord
from trainer.report.recomputed import recomputed_flops_per_token
from trainer.report.summary import Steps, Tally
from trainer.run.holdings import holdings
from trainer.run.link import Link, LinkCounters
from trainer.run.memory import RunMemory
from trainer.run.ranks import gather
from trainer.shape import layer_shape

#: census' name for what the embedding, the last norm and the loss head keep
_OUTSIDE = "outside the layers"


class Watch:
    """Decides when to look, and looks.

    Args:
        chunks, optimizer: what training holds in memory; optimizer None: optim=none.
        link: None: nothing is copied.
    """

    def __init__(
        self,
        config: Config,
        *,
        memory: RunMemory,
        chunks: Sequence[Any],
        optimizer: Any,
        choice: Choice,
        first_step: int,
        vocab_size: int,
        micro_batches: int,
        link: Link | None,
        device: torch.device,
    ) -> None:
        self._config, self._memory, self._chunks, self._optimizer = config, memory, chunks, optimizer
        self._choice, self._link, self._device, self._micro_batches = choice, link, device, micro_batches
        self._last_of_lead_in = first_step - 1 + choice.steps if choice.lead_in is not None else None
        self._counters = LinkCounters(device)
        self._counted: tuple[int, int] | None = None
        padded = config.model.padded_vocab_size(vocab_size, config.parallel.tensor)
        self._flops = flops_per_token(config.model, padded, config.model.seq_length)
        self._lead_in, self._interval = Steps(), Steps()
        self._told: set[str] = set()

    def due(self, step: int) -> bool:
        """Whether to look after this step; asked before it."""
        trainer = self._config.trainer
        due = step % trainer.log_every == 0 or step in (trainer.steps, self._last_of_lead_in)
        if due:
            self._counted = self._counters.read()
        return due

    def add(self, record: StepRecord) -> None:
        (self._interval if record.under == "plan" else self._lead_in).add(record)

    def look(self, record: StepRecord) -> Interval:
        """After a step that was due. Collective."""
        use = self._memory.link_use()
        on_gpu = self._device.type == "cuda"
        own = RankUse(
            rank=dist.get_rank(),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            forward_s=record.forward_s,
            backward_s=record.backward_s,
            optimizer_s=record.optimizer_s,
            stall_s=use.stall_s,
            peak_saved_bytes=record.memory.peak_saved_bytes,
            peak_allocated_bytes=record.memory.peak_allocated_bytes,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
            device_bytes=torch.cuda.mem_get_info()[1] if on_gpu else None,
            host_pool_bytes=self._memory.host_pool_bytes,
            host_limit_bytes=self._memory.host_limit_bytes,
            rss_bytes=record.memory.rss_bytes,
        )
        plan = self._memory.equivalent_plan if record.under == "plan" else self._choice.lead_in
        sites = self._sites()
        interval = Interval(
            step=record.step,
            under=record.under,
            ranks=gather(own),
            categories=self._categories(own, sites),
            sites=sites,
            copies=self._copies(use),
            recomputed_flops_per_token=self._recomputed(plan) if plan else {},
            delta=self._delta(),
        )
        self._interval = Steps()
        return interval

    @property
    def stops(self) -> bool:
        """Whether an advice ends the run."""
        return self._config.guard.action is GuardAction.stop

    def judge(self, interval: Interval) -> list[Advice]:
        """What the guard has to say that it has not said before; the first rank speaks for all."""
        if interval.under != "plan" or dist.get_rank() > 0:
            return []
        freed = freed_shares(self._memory.equivalent_plan, layer_shape(self._config, self._device.type == "cuda"))
        seen = observe(interval, self._flops.total, freed)
        fresh = [advice for advice in advise(self._config, seen) if advice.threshold not in self._told]
        self._told.update(advice.threshold for advice in fresh)
        return fresh

    def _delta(self) -> Delta | None:
        """Of the interval's steps, once they are more than the warm-up."""
        if len(self._interval.step_s) <= WARM_UP_STEPS:
            return None
        tally = Tally(plan=self._interval, lead_in=self._lead_in)
        figures, baseline = self._interval.figures(), tally.baseline(self._choice)
        return delta(figures, baseline.figures) if figures and baseline else None

    def _sites(self) -> dict[str, dict[str, int]]:
        sites: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for _, site, action, nbytes, _ in self._memory.census_rows():
            sites[site][action.value] += nbytes
        return {site: dict(actions) for site, actions in sites.items()}

    def _categories(self, own: RankUse, sites: dict[str, dict[str, int]]) -> dict[str, int]:
        held = holdings(self._chunks, self._optimizer)
        # one micro-batch at a time is between the loss head's forward and its backward
        head = sites.get(_OUTSIDE, {}).get("keep", 0) // self._micro_batches
        head = min(head, own.peak_saved_bytes)
        categories = {
            "weights": held.weights_bytes,
            "gradients": held.gradients_bytes,
            "optimizer": held.optimizer_bytes,
            "stash": own.peak_saved_bytes - head,
            "loss head": head,
        }
        if own.peak_allocated_bytes is not None and own.peak_reserved_bytes is not None:
            categories["workspace"] = max(0, own.peak_allocated_bytes - sum(categories.values()))
            categories["fragmentation"] = own.peak_reserved_bytes - own.peak_allocated_bytes
        return categories

    def _copies(self, use: Any) -> Copies | None:
        if self._link is None:
            return None
        before, after = self._counted, self._counters.read()
        counted = (after[0] - before[0], after[1] - before[1]) if before and after else (None, None)
        return Copies(
            use.out_bytes,
            use.out_s,
            use.back_bytes,
            use.back_s,
            self._link.out_bytes_per_s,
            self._link.back_bytes_per_s,
            *counted,
        )

    def _recomputed(self, plan: Plan) -> dict[str, float]:
        model = self._config.model
        return dict(recomputed_flops_per_token(plan, self._flops, model.num_layers, model.gated))
