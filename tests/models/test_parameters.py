"""The closed form against published counts, and against models really built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from models.config import Activation, ModelConfig, Normalization, Position
from models.parameters import parameter_count

PRESETS = Path(__file__).parents[2] / "conf" / "model"

PUBLISHED = {
    "gpt2_125m": 124_439_808,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "gpt3_175b": 174_604_259_328,
}


def preset(name: str) -> ModelConfig:
    schema = OmegaConf.structured(ModelConfig)
    schema._set_flag("readonly", None)
    model = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(PRESETS / f"{name}.yaml")))
    assert isinstance(model, ModelConfig)
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_its_published_number_of_parameters(name: str) -> None:
    assert parameter_count(preset(name)) == PUBLISHED[name]


def test_a_published_size_in_billions() -> None:
    """Megatron-LM tells of the largest model on its scaling chart no more than that."""
    assert parameter_count(preset("gpt_462b")) / 1e9 == pytest.approx(462, rel=2e-3)


def test_every_preset_is_checked_and_carries_its_name() -> None:
    names = {path.stem for path in PRESETS.glob("*.yaml")}
    assert names == {*PUBLISHED, "gpt_462b", "tiny"}
    assert all(preset(name).name == name for name in names)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_query_groups": 1},
        {"kv_channels": 24},
        {"ffn_hidden_size": 96},
        {"normalization": Normalization.layernorm},
        {"activation": Activation.gelu},
        {"bias": True},
        {"qkv_bias": True},
        {"bias": True, "activation": Activation.gelu, "normalization": Normalization.layernorm},
        {"tied_embeddings": True},
        {"position": Position.learned},
        {"position": Position.learned, "tied_embeddings": True, "bias": True, "num_query_groups": 2},
    ],
    ids=str,
)
def test_closed_form_equals_a_built_model(change: dict[str, object], build: Callable[..., Any]) -> None:
    model = replace(ModelConfig(num_layers=2, hidden_size=64, seq_length=16), **change)  # type: ignore[arg-type]
    built = build(model, vocab_size=250)
    assert parameter_count(model, padded_vocab=256) == sum(p.numel() for p in built.parameters())


def test_a_count_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size"):
        parameter_count(ModelConfig())
