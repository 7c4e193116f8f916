"""Training and held-out samples. Positions never depend on how long the run is, so that runs of any length and resumed
runs read the same samples at the same steps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from trainer.config.errors import ConfigError
from trainer.config.registered import open_registered
from trainer.config.schema import Config, DataSource
from trainer.run.data.corpus import build_corpus, default_cache_dir, draft_of, publish, stdlib_files, text_files
from trainer.run.data.tokenizer import Tokenizer, load_tokenizer

#: tokens and labels, int64 [seq_length], and loss_mask, float32 [seq_length]
Sample = Mapping[str, torch.Tensor]
#: samples of the mock source's held-out part are drawn from another stream
_MOCK_HELD_OUT = 1 << 62


class SampleSource(Protocol):
    """Training samples in blocks of one length, each block shuffled by its own seed, without end."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that samples may hold."""

    @property
    def block_length(self) -> int:
        """Samples in a block."""

    def block(self, number: int) -> Sequence[Sample]:
        """The samples of one block. Every rank must call with the same numbers in the same order."""

    def held_out(self) -> Sequence[Sample]:
        """Samples that training never sees, always in the same order.

        Raises:
            ConfigError: data.split leaves none.
        """


def open_samples(config: Config) -> SampleSource:
    """The source that the data group describes, its caches built.

    Collective: every rank must call it.

    Raises:
        ConfigError: naming the data.* key that is wrong.
    """
    data = config.data
    if data.source is DataSource.registered:
        return open_registered(config)  # type: ignore[no-any-return]
    if data.source is DataSource.mock:
        return MockSamples(
            data.vocab_size or config.model.vocab_size or 256, config.model.seq_length, config.trainer.seed
        )
    tokenizer = load_tokenizer(data.tokenizer)
    cache_dir = Path(data.cache_dir).expanduser() if data.cache_dir else default_cache_dir()
    if data.source is DataSource.megatron:
        blend = parse_blend(data.path)
        vocab_size = data.vocab_size or (config.model.vocab_size if data.tokenizer == "byte" else None)
        return MegatronSamples(blend, config, vocab_size or tokenizer.vocab_size, tokenizer, cache_dir)
    files = stdlib_files() if data.source is DataSource.stdlib else text_files(data.path)
    if dist.get_rank() == 0:
        build_corpus(files, tokenizer, cache_dir)
    dist.barrier()
    blend = Blend((str(build_corpus(files, tokenizer, cache_dir)),), None)
    return MegatronSamples(blend, config, tokenizer.vocab_size, tokenizer, cache_dir)


@dataclass(frozen=True)
class MockSamples:
    """Uniformly random tokens; sample i is a function of the seed and i alone."""

    vocab_size: int
    seq_length: int
    seed: int
    block_length: int = 1 << 40

    def block(self, number: int) -> Sequence[Sample]:
        return _MockBlock(self, number * self.block_length, self.block_length)

    def held_out(self) -> Sequence[Sample]:
        return _MockBlock(self, _MOCK_HELD_OUT, 1 << 20)


@dataclass(frozen=True)
class _MockBlock(Sequence[Sample]):
    source: MockSamples
    first: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        source = self.source
        random = np.random.Generator(np.random.Philox(key=[source.seed, self.first + index]))
        text = torch.from_numpy(random.integers(0, source.vocab_size, source.seq_length + 1))
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(source.seq_length)}


@dataclass(frozen=True)
class Blend:
    """Prefixes of indexed datasets, and their weights where there are several."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(path: Any) -> Blend:
    """data.path of the megatron source, which the rules have checked: a prefix, or [weight, prefix, weight, ...]."""
    items = [path] if isinstance(path, str) else list(path)
    prefixes = items if len(items) == 1 else items[1::2]
    # Megatron draws a single prefix without weights by whole passes
    weights = tuple(float(weight) for weight in items[::2]) if len(prefixes) > 1 else None
    return Blend(tuple(os.path.expanduser(prefix) for prefix in prefixes), weights)


@dataclass(frozen=True)
class _SpecialTokens:
    """What Megatron's GPTDataset asks of a tokenizer; without masks at document ends it reads only the size."""

    vocab_size: int
    eod: int

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "megafit", "vocab_size": self.vocab_size}


class MegatronSamples:
    """Megatron's GPTDataset (or BlendedDataset) over indexed datasets, rebuilt with a new seed for each pass.

    Raises:
        ConfigError: the files are no indexed datasets, data.split is malformed, or too few tokens.
    """

    def __init__(self, blend: Blend, config: Config, vocab_size: int, tokenizer: Tokenizer, cache_dir: Path) -> None:
        self.vocab_size = vocab_size
        self._blend = blend
        self._seq_length = config.model.seq_length
        self._split = config.data.split
        self._seed = config.trainer.seed
        self._special = _SpecialTokens(vocab_size, -1 if tokenizer.eod is None else tokenizer.eod)
        self._cache_dir = cache_dir / "samples"
        self._user_files = config.data.source is not DataSource.stdlib
        self._stamps = [Path(prefix + ".idx").stat().st_mtime_ns for prefix in blend.prefixes]
        train_samples, held_out_samples = self._count_samples()
        self.block_length = train_samples
        # with weights Megatron must be told how many samples to draw, without it draws one pass
        self._sizes = [train_samples, held_out_samples, None] if blend.weights else [None, None, None]
        self._first_block, self._held_out = self._build(0)

    def block(self, number: int) -> Sequence[Sample]:
        return self._first_block if number == 0 else self._build(number)[0]

    def held_out(self) -> Sequence[Sample]:
        if not self._held_out:
            raise ConfigError(
                "data.split",
                f"{self._split!r} leaves no held-out sample of model.seq_length {self._seq_length}",
                "Give validation a larger share, or set trainer.eval_batches=0",
            )
        return self._held_out

    def _dataset_config(self, seed: int, cache: str) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        return GPTDatasetConfig(
            random_seed=seed,
            sequence_length=self._seq_length,
            blend=(list(self._blend.prefixes), list(self._blend.weights) if self._blend.weights else None),
            split=self._split,
            tokenizer=self._special,
            path_to_cache=cache,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def _count_samples(self) -> tuple[int, int]:
        """Whole samples in the training and the held-out share, by Megatron's own rounding of document numbers."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        shares = self._dataset_config(self._seed, "").split_matrix[:2]
        totals = [0, 0]
        for prefix in self._blend.prefixes:
            try:
                # the array is a view of the dataset's file and dies with it
                dataset = IndexedDataset(prefix)
                lengths = dataset.sequence_lengths.astype(np.int64)
            except Exception as error:  # whatever a file that is no index leads Megatron's reader into
                raise ConfigError(
                    "data.path", f"{prefix}.idx is no Megatron index ({error})", "Build it with IndexedDatasetBuilder"
                ) from error
            asked_bytes = int(lengths.sum()) * np.dtype(dataset.index.dtype).itemsize
            held_bytes = Path(prefix + ".bin").stat().st_size
            if held_bytes != asked_bytes:
                raise ConfigError(
                    "data.path",
                    f"{prefix}.bin holds {held_bytes} bytes, and its index asks for {asked_bytes}",
                    "Build the pair again",
                )
            for share, bounds in enumerate(shares):
                if bounds is None:
                    continue
                begin, end = (round(bound * float(lengths.size)) for bound in bounds)
                tokens = int(lengths[begin:end].sum())
                totals[share] += max(tokens - 1, 0) // self._seq_length
                if share == 0 and tokens <= self._seq_length:
                    raise ConfigError(
                        "data.path" if self._user_files else "model.seq_length",
                        f"the training share of {prefix} holds {tokens} tokens, and one sample needs "
                        f"model.seq_length + 1 = {self._seq_length + 1}",
                        "Give more text or a shorter model.seq_length",
                    )
        return totals[0], totals[1]

    def _build(self, number: int) -> tuple[Sequence[Sample], Sequence[Sample] | None]:
        """Samples of a pass, their index cached. Megatron writes index files in place, so a run that is killed would
        leave half of one under its final name: they are built in a folder of their own and published whole."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        blend = self._blend
        identity = [blend.prefixes, blend.weights, self._stamps, self._sizes, self._split, self._seq_length]
        key = json.dumps([identity, self._seed, number, self._special.unique_identifiers])
        folder = self._cache_dir / hashlib.sha256(key.encode()).hexdigest()[:24]
        draft = _agree(lambda: None if folder.is_dir() else str(draft_of(folder)))
        dataset_config = self._dataset_config(self._seed + number, draft or str(folder))
        sizes = [
            size if bounds is not None else 0
            for size, bounds in zip(self._sizes, dataset_config.split_matrix, strict=True)
        ]
        train, held_out, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config).build()
        if draft is not None:
            dist.barrier()
            if dist.get_rank() == 0:
                publish(Path(draft), folder)
                shutil.rmtree(draft, ignore_errors=True)
        return train, held_out


def _agree(choose: Callable[[], str | None]) -> str | None:
    """What rank 0 chooses, on every rank."""
    chosen: list[str | None] = [choose() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]
