from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from models import cpu
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, DataSource
from trainer.run.data.batches import Batches, BatchShape, context_share
from trainer.run.data.samples import Blend, SampleSource, open_samples, parse_blend
from trainer.run.distributed import world

MakeConfig = Callable[..., Config]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def alone(make_config: MakeConfig) -> Iterator[None]:
    if not torch.cuda.is_available():
        cpu.install()
    with world(make_config()):
        yield


def indexed(prefix: Path, documents: list[list[int]]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def megatron_config(make_config: MakeConfig, path: Any, **data: Any) -> Config:
    options = {"source": DataSource.megatron, "path": path, "split": "100,0,0", **data}
    return make_config(eval_batches=0, model={"seq_length": 4}, data=options)


def read(source: SampleSource, number: int) -> list[list[int]]:
    block = source.block(number)
    return [block[index]["tokens"].tolist() for index in range(source.block_length)]


def test_a_pass_holds_each_sample_once_in_an_order_of_its_own(make_config: MakeConfig, tmp_path: Path) -> None:
    path = indexed(tmp_path / "d", [list(range(41))])
    source = open_samples(megatron_config(make_config, path))
    passes = [read(source, number) for number in range(3)]
    assert source.block_length == 10
    for samples in passes:
        assert sorted(samples) == [list(range(first, first + 4)) for first in range(0, 40, 4)]
    assert passes[0] != passes[1] != passes[2]
    sample = source.block(0)[0]
    assert sample["labels"].tolist() == [token + 1 for token in sample["tokens"].tolist()]
    assert sample["loss_mask"].tolist() == [1.0] * 4


def test_indexes_are_cached_whole(make_config: MakeConfig, tmp_path: Path) -> None:
    path = indexed(tmp_path / "d", [list(range(41))])
    config = megatron_config(make_config, path, cache_dir=str(tmp_path / "cache"))
    first = read(open_samples(config), 0)
    (folder,) = (tmp_path / "cache" / "samples").iterdir()
    stamps = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert len([name for name in stamps if name.endswith(".npy")]) == 3
    assert read(open_samples(config), 0) == first
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == stamps
    # the same name with other content is another corpus
    indexed(tmp_path / "d", [list(range(100, 141))])
    assert min(read(open_samples(config), 0)) == [100, 101, 102, 103]


def test_a_blend_draws_by_weight(make_config: MakeConfig, tmp_path: Path) -> None:
    low = indexed(tmp_path / "low", [[1] * 401])
    high = indexed(tmp_path / "high", [[2] * 401])
    source = open_samples(megatron_config(make_config, [3, low, "1", high]))
    drawn = [source.block(0)[index]["tokens"][0].item() for index in range(source.block_length)]
    assert source.block_length == 200
    assert drawn.count(1) == 150 and drawn.count(2) == 50


def test_training_and_held_out_share_no_document(make_config: MakeConfig, tmp_path: Path) -> None:
    path = indexed(tmp_path / "d", [[number] * 20 for number in range(20)])
    source = open_samples(megatron_config(make_config, path, split="80,20,0"))
    trained = {token for sample in read(source, 0) for token in sample}
    held_out = source.held_out()
    kept = {token for index in range(len(held_out)) for token in held_out[index]["tokens"].tolist()}
    assert trained == set(range(16)) and kept == set(range(16, 20))


def test_paths_of_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_blend("~/d") == Blend((f"{tmp_path}/d",), None)
    assert parse_blend(["0.5", "~/d", 2, "e"]) == Blend((f"{tmp_path}/d", "e"), (0.5, 2.0))
    assert parse_blend([1, "e"]) == Blend(("e",), None)


def test_an_index_that_is_none(make_config: MakeConfig, tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        (tmp_path / f"d{ending}").write_bytes(b"no index at all, but long enough to read a header from")
    with pytest.raises(ConfigError, match=r"data.path: .*d.idx is no Megatron index"):
        open_samples(megatron_config(make_config, str(tmp_path / "d")))


def test_an_index_with_the_wrong_bin(make_config: MakeConfig, tmp_path: Path) -> None:
    path = indexed(tmp_path / "d", [list(range(41))])
    (tmp_path / "d.bin").write_bytes(b"\0\0" * 40)
    with pytest.raises(ConfigError, match=r"data.path: .*d.bin holds 80 bytes, and its index asks for 82"):
        open_samples(megatron_config(make_config, path))


def test_too_little_text(make_config: MakeConfig, tmp_path: Path) -> None:
    path = indexed(tmp_path / "d", [list(range(4))])
    with pytest.raises(
        ConfigError, match=r"data.path: the training share of .*d holds 4 tokens, and one sample needs .*= 5"
    ):
        open_samples(megatron_config(make_config, path))


def test_no_held_out_sample(make_config: MakeConfig, tmp_path: Path) -> None:
    source = open_samples(megatron_config(make_config, indexed(tmp_path / "d", [[1] * 50])))
    Batches(source, BatchShape(2, 1, 0, 1), 256, 0, CPU)
    with pytest.raises(ConfigError, match=r"data.split: '100,0,0' leaves no held-out sample of model.seq_length 4"):
        Batches(source, BatchShape(2, 1, 0, 1), 256, 1, CPU)


def test_mock_samples_are_a_function_of_seed_and_index(make_config: MakeConfig) -> None:
    def first(seed: int) -> list[int]:
        config = make_config(seed=seed, data={"source": DataSource.mock, "vocab_size": 11})
        sample = open_samples(config).block(0)[5]
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        return [*sample["tokens"].tolist(), sample["labels"][-1].item()]

    assert first(1) == first(1) != first(2)
    assert len(first(1)) == 17 and max(first(1)) <= 10
    source = open_samples(make_config(data={"source": DataSource.mock}))
    assert source.vocab_size == 256
    assert source.block(0)[0]["tokens"].tolist() != source.held_out()[0]["tokens"].tolist()


class Numbered:
    """Sample i holds the token i, in blocks of 10."""

    vocab_size = 1000
    block_length = 10

    def __init__(self) -> None:
        self.asked: list[int] = []

    def block(self, number: int) -> list[dict[str, torch.Tensor]]:
        self.asked.append(number)
        return [self._sample(10 * number + offset) for offset in range(10)]

    def held_out(self) -> list[dict[str, torch.Tensor]]:
        return [self._sample(500 + index) for index in range(7)]

    def _sample(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((4,), number)
        return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(4)}


def first_tokens(batches: Iterator[Any]) -> list[list[int]]:
    return [batch.tokens[:, 0].tolist() for batch in batches]


def test_ranks_share_out_a_step_and_cross_into_the_next_block() -> None:
    read_by: list[list[list[int]]] = []
    for rank in range(2):
        source = Numbered()
        batches = Batches(source, BatchShape(2, 2, rank, 2), 1000, 0, CPU)
        read_by.append(first_tokens(batches.train(0)) + first_tokens(batches.train(8)))
        # both ranks enter block 1 at the same step, though only one reads from it in the first micro-batch
        assert source.asked == [0, 1]
    assert read_by[0] == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert read_by[1] == [[2, 3], [6, 7], [10, 11], [14, 15]]


def test_the_same_held_out_batches_each_time() -> None:
    batches = Batches(Numbered(), BatchShape(2, 1, 1, 2), 1000, 8, CPU)
    # 7 samples make one whole batch of 2 x 2
    assert batches.eval_batches == 1
    assert first_tokens(batches.held_out()) == first_tokens(batches.held_out()) == [[502, 503]]
    assert Batches(Numbered(), BatchShape(1, 2, 0, 1, multiple=2), 1000, 5, CPU).eval_batches == 4
    assert Batches(Numbered(), BatchShape(1, 2, 0, 1, multiple=2), 1000, 1, CPU).eval_batches == 2
    alone = Batches(Numbered(), BatchShape(8, 1, 0, 1), 1000, 8, CPU)
    assert first_tokens(alone.held_out()) == [[500, 501, 502, 503, 504, 505, 506, 500]]


def test_a_token_beyond_the_vocabulary() -> None:
    batches = Batches(Numbered(), BatchShape(2, 1, 0, 1), 12, 0, CPU)
    assert first_tokens(batches.train(10)) == [[10, 11]]
    with pytest.raises(ConfigError, match=r"data.path: it holds token id 13, outside the vocabulary of 12"):
        list(batches.train(12))


def test_context_ranks_take_one_chunk_from_each_end() -> None:
    tokens = torch.arange(8).repeat(2, 1)
    assert context_share(tokens, 0, 2).tolist() == [[0, 1, 6, 7]] * 2
    assert context_share(tokens, 1, 2).tolist() == [[2, 3, 4, 5]] * 2
    batches = Batches(Numbered(), BatchShape(1, 1, 0, 1, context_rank=1, context_size=2), 1000, 0, CPU)
    (batch,) = batches.train(0)
    assert batch.position_ids.tolist() == [[1, 2]]
