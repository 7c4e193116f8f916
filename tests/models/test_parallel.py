"""Two ranks over gloo: sequence parallelism, which Megatron's local norms refuse, pipelines, the chunked loss head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU over gloo"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank printed."""
    store = tmp_path_factory.mktemp("store") / "store"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    workers = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("parallel_worker.py"), str(rank), store],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_sequence_parallel_norms_get_the_gradients_of_plain_ones(ranks: list[Any]) -> None:
    plain, sequence = ranks[0]["plain"], ranks[0]["sequence"]
    assert sequence["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert len(plain["norms"]) == 9
    for name, gradient in plain["norms"].items():
        assert sequence["norms"][name] == pytest.approx(gradient, rel=1e-4, abs=1e-7), name


def test_ranks_agree(ranks: list[Any]) -> None:
    assert ranks[0]["plain"]["loss"] == ranks[1]["plain"]["loss"]
    assert ranks[0]["sequence"]["norms"] == ranks[1]["sequence"]["norms"]


def test_each_stage_builds_its_own_chunks(ranks: list[Any]) -> None:
    chunks = [{**chunk, "tied": None} for rank in ranks for chunk in rank["chunks"]]
    nothing = {"embedding": False, "output": False, "final_norm": False, "tied": None}
    assert chunks == [
        {**nothing, "layers": [1], "embedding": True},
        {**nothing, "layers": [3]},
        {**nothing, "layers": [2]},
        {**nothing, "layers": [4], "output": True, "final_norm": True},
    ]


def test_the_last_stage_starts_from_the_first_ones_embedding(ranks: list[Any]) -> None:
    first, last = ranks[0]["chunks"][0], ranks[1]["chunks"][1]
    assert first["tied"] == last["tied"] != 0


@pytest.mark.parametrize("layout", ["tensor", "tensor_tied", "sequence", "in_place"])
def test_our_heads_over_a_split_vocabulary_are_the_full_one(ranks: list[Any], layout: str) -> None:
    for rank in ranks:
        found = rank[f"head_{layout}"]
        assert found["head"] == ("InPlaceOutputLayer" if layout == "in_place" else "ChunkedOutputLayer")
        assert found["losses"] < 1e-6 and found["gradients"] < 1e-6
        assert ("output_layer.weight" in found["names"]) is (layout != "tensor_tied")


@pytest.mark.parametrize("layout", ["pipeline", "pipeline_tied"])
def test_only_the_last_stage_has_the_chunked_head(ranks: list[Any], layout: str) -> None:
    first, last = (rank[f"head_{layout}"] for rank in ranks)
    assert (first["head"], last["head"]) == (None, "ChunkedOutputLayer")
    assert first["losses"] == first["gradients"] == 0.0
    assert last["losses"] < 1e-6 and last["gradients"] < 1e-6
    assert "output_layer.weight" in last["names"] and "output_layer.weight" not in first["names"]
