from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig
from trainer.config.schema import Config, DataConfig, DataSource, OptimConfig, ParallelConfig, TrainerConfig

#: dropout on, so that generators matter
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=16,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 text files of 200 to 700 words of a small vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    source = random.Random(3)
    words = ["".join(source.choices("abcdefgh", k=source.randint(1, 6))) for _ in range(50)]
    for number in range(40):
        text = " ".join(source.choices(words, k=source.randint(200, 700)))
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def make_config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """make_config(steps=..., **of TrainerConfig, model={...}, parallel={...}, optim={...}, data={...}, **of Config)."""
    cache = tmp_path_factory.mktemp("cache")
    trainer_keys = {field.name for field in dataclasses.fields(TrainerConfig)}

    def make(**options: Any) -> Config:
        trainer = {key: options.pop(key) for key in list(options) if key in trainer_keys}
        text = {"source": DataSource.text, "path": str(corpus / "*.txt"), "cache_dir": str(cache), "split": "80,20,0"}
        return Config(
            model=dataclasses.replace(MODEL, **options.pop("model", {})),
            data=DataConfig(**{**text, **options.pop("data", {})}),
            optim=OptimConfig(**{"lr": 5e-3, "warmup_steps": 2, **options.pop("optim", {})}),
            parallel=ParallelConfig(**options.pop("parallel", {})),
            trainer=TrainerConfig(**{"steps": 8, "micro_batch_size": 4, "eval_batches": 2, **trainer}),
            **options,
        )

    return make
