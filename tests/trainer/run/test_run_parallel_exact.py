"""Under every layout each pair of recompute and offload gives the bits of keeping everything, dropout on (gloo)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memory.options import Granularity, Method, OffloadKind, OffloadOptions, RecomputeOptions
from tests.trainer.run.run_pairs_worker import STEPS, Outcome
from trainer.config.machine import Machine
from trainer.config.rules import validate
from trainer.config.schema import Config

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parents[3]

SELECTIVE = RecomputeOptions(Granularity.selective)
REGIONS = RecomputeOptions(Granularity.selective, modules=["core_attn", "mlp", "layernorm"])
UNIFORM2 = RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=2)
BLOCK1 = RecomputeOptions(Granularity.full, method=Method.block, num_layers=1)
DISTRIBUTED = RecomputeOptions(Granularity.full, method=Method.uniform, num_layers=1, distribute_saved_activations=True)
OFFLOAD = {
    "none": OffloadOptions(),
    "fine_grained": OffloadOptions(OffloadKind.fine_grained, min_bytes=0),
    "layerwise": OffloadOptions(OffloadKind.layerwise, min_bytes=0),
}


@dataclass(frozen=True)
class Layout:
    """A split over processes, and what full and selective recomputation mean in its test."""

    parallel: dict[str, Any]
    full: RecomputeOptions
    selective: RecomputeOptions = SELECTIVE
    processes: int = 2
    layers: int = 4
    #: None: all
    pairs: tuple[str, ...] | None = None

    def options(self) -> dict[str, tuple[RecomputeOptions, OffloadOptions]]:
        """All pairs, keeping everything first."""
        recompute = {"none": RecomputeOptions(), "selective": self.selective, "full": self.full}
        pairs = {f"{r}-{o}": (recompute[r], OFFLOAD[o]) for r in recompute for o in OFFLOAD}
        return {pair: pairs[pair] for pair in self.pairs or pairs}


INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2, "overlap_p2p_comm": True}
DATA = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "dp": Layout(DATA, UNIFORM2, REGIONS),
    "tp": Layout({"tensor": 2}, DISTRIBUTED, REGIONS),
    "sp": Layout({"tensor": 2, "sequence_parallel": True}, BLOCK1),
    "pp": Layout({"pipeline": 2}, UNIFORM2),
    "interleaved": Layout(INTERLEAVED, BLOCK1, layers=8),
    "tp_pp": Layout({"tensor": 2, "pipeline": 2}, DISTRIBUTED, processes=4),
    "sp_interleaved": Layout(
        {"tensor": 2, "sequence_parallel": True, **INTERLEAVED},
        UNIFORM2,
        processes=4,
        layers=8,
        pairs=("none-none", "selective-fine_grained", "full-layerwise"),
    ),
}


def configs(layout: Layout, make_config: MakeConfig) -> dict[str, Config]:
    """Four micro-batches a step on each data-parallel rank."""
    return {
        pair: make_config(
            model={"num_layers": layout.layers},
            parallel=layout.parallel,
            recompute=recompute,
            offload=offload,
            micro_batch_size=2,
            global_batch_size=16 if layout.parallel is DATA else 8,
        )
        for pair, (recompute, offload) in layout.options().items()
    }


@pytest.fixture(scope="module")
def outcomes(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Outcome]]]:
    """By layout: what each rank found of each pair. One group of processes runs all layouts of its size."""
    jobs: dict[int, dict[str, dict[str, Config]]] = {2: {}, 4: {}}
    for name, layout in LAYOUTS.items():
        jobs[layout.processes][name] = configs(layout, make_config)
    path = tmp_path_factory.mktemp("exact") / "jobs"
    path.write_bytes(pickle.dumps(jobs))
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("run_pairs_worker.py")), str(path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=500)
    found: dict[str, list[dict[str, Outcome]]] = pickle.loads(Path(f"{path}.found").read_bytes())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_is_bitwise(layout: str, outcomes: dict[str, list[dict[str, Outcome]]]) -> None:
    assert len(outcomes[layout]) == LAYOUTS[layout].processes
    for rank, by_pair in enumerate(outcomes[layout]):
        assert by_pair.keys() == LAYOUTS[layout].options().keys()
        kept = by_pair["none-none"]
        assert len(kept.losses) == STEPS and kept.losses[0] != kept.losses[1] and kept.compared > 50
        for pair, outcome in by_pair.items():
            where = f"{layout}, rank {rank}, {pair}"
            assert outcome.losses == kept.losses, where
            assert outcome.different == [], where
            assert outcome.compared == kept.compared, where
            assert outcome.held_bytes == 0, where
            if pair != "none-none":
                assert outcome.peak_saved_bytes < kept.peak_saved_bytes, where


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_user_may_ask_for_every_pair(layout: str, make_config: MakeConfig) -> None:
    here = Machine(LAYOUTS[layout].processes, has_cuda=False, te_version=None, environment={})
    for config in configs(LAYOUTS[layout], make_config).values():
        assert validate(config, here) == []
