"""The field names of the installed TransformerConfig, read from its source: neither Megatron nor torch is imported."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SOURCES = ("model_parallel_config.py", "transformer/transformer_config.py")
_CLASSES = ("ModelParallelConfig", "TransformerConfig")


@cache
def transformer_config_fields() -> frozenset[str]:
    """Every field of TransformerConfig and of the class below it; empty if Megatron is not installed."""
    spec = find_spec("megatron")
    for place in (spec.submodule_search_locations or []) if spec else []:
        core = Path(place) / "core"
        if all((core / source).is_file() for source in _SOURCES):
            return frozenset(name for source in _SOURCES for name in _fields(core / source))
    return frozenset()


def _fields(source: Path) -> list[str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    statements = [statement for node in classes for statement in node.body]
    return [s.target.id for s in statements if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
