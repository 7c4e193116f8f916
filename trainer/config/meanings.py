"""What groups, options and keys mean, in the words that stand beside them in conf/ and in the sources. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml

from trainer.config.search_path import CONF

_SOURCES = (
    CONF.parent / "trainer" / "config" / "schema.py",
    CONF.parent / "memory" / "options.py",
    CONF.parent / "models" / "config.py",
)


def group_meanings() -> dict[str, str]:
    """Group -> what it chooses, as `python train.py --help` tells it."""
    template = yaml.safe_load((CONF / "hydra" / "help" / "megafit.yaml").read_text())["template"]
    listed = template.partition("Groups, chosen as")[2].partition("Options of each")[0]
    return dict(re.findall(r"^  (\w+) {2,}(\S.*)$", listed, re.MULTILINE))


def group_options(group: str) -> dict[str, str]:
    """Option of ours -> its own words: the comment at the top of its file."""
    return {path.stem: _top_comment(path) for path in sorted((CONF / group).glob("*.yaml"))}


def _top_comment(path: Path) -> str:
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line[1:].strip() for line in lines if "@package" not in line)


@cache
def field_meanings() -> dict[tuple[str, str], str]:
    """(class, field) -> the `#:` comment above it, empty if there is none; None is written null, as in YAML."""
    found = {}
    for source in _SOURCES:
        text = source.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        comment = " ".join(_comment_above(lines, field.lineno - 1))
                        found[node.name, field.target.id] = re.sub(r"\bNone\b", "null", comment)
    return found


def _comment_above(lines: Sequence[str], index: int) -> list[str]:
    comment: list[str] = []
    while index > 0 and lines[index - 1].strip().startswith("#:"):
        index -= 1
        comment.insert(0, lines[index].strip().removeprefix("#:").strip())
    return comment
