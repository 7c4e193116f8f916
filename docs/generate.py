"""Fills the parts of README.md and docs/ that follow from the code, so that they can't drift from it. Imports no torch.

    python docs/generate.py            writes them
    python docs/generate.py --check    writes nothing and fails when one is stale

A part is what stands between `<!-- generated:NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.scale import RESULT as SCALE  # noqa: E402
from docs.scale import config_of  # noqa: E402
from memory.plan import Plan  # noqa: E402
from memory.planner.pipeline import predict  # noqa: E402
from memory.sites import (  # noqa: E402
    ABSENT_MODULES,
    INSIDE_REGION,
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    SITES,
    LayerShape,
    Module,
)
from trainer.config.arguments import parse_arguments  # noqa: E402
from trainer.config.compose import compose_command  # noqa: E402
from trainer.config.meanings import field_meanings, group_meanings, group_options  # noqa: E402
from trainer.config.schema import Config  # noqa: E402
from trainer.config.suggest import unwrapped  # noqa: E402
from trainer.pipeline import make_setting  # noqa: E402

CONF = ROOT / "conf"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAIRS = ROOT / "docs" / "results" / "pairs-cpu.json"
PAIRS_H200 = ROOT / "docs" / "results" / "pairs-h200.json"
PLANS_H200 = ROOT / "docs" / "results" / "plans-h200.json"
MIB = 1 << 20

_PART = re.compile(r"(<!-- generated:([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: one layer of Llama-3-8B, one sequence of 8192 tokens in bf16 with fused attention
LLAMA_LAYER = LayerShape(
    seq_length=8192,
    micro_batch_size=1,
    hidden=4096,
    ffn=14336,
    heads=32,
    query_width=4096,
    kv_width=1024,
    gated=True,
    fused_attention=True,
    element_bytes=2,
)
#: no two products of sizes are equal in this one, so that a number of bytes tells its formula
_ODD_LAYER = LayerShape(
    seq_length=5,
    micro_batch_size=7,
    hidden=11,
    ffn=13,
    heads=17,
    query_width=19,
    kv_width=23,
    gated=True,
    fused_attention=True,
    element_bytes=8,
)
_FORMULAS: Mapping[str, Callable[[LayerShape], int]] = {
    "T·H·b": lambda s: s.tokens * s.hidden * s.element_bytes,
    "T·Q·b": lambda s: s.tokens * s.query_width * s.element_bytes,
    "T·K·b": lambda s: s.tokens * s.kv_width * s.element_bytes,
    "T·F·b": lambda s: s.tokens * s.ffn * s.element_bytes,
    "2·T·F·b": lambda s: 2 * s.tokens * s.ffn * s.element_bytes,
    "4·T·heads": lambda s: 4 * s.tokens * s.heads,
    "measured": lambda s: 0,
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


# --- configuration


def group_defaults() -> dict[str, str]:
    entries = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    chosen = {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}
    return {group: str(option) for group, option in chosen.items() if option is not None}


def groups_part() -> str:
    defaults = group_defaults()
    rows = []
    for group, meaning in group_meanings().items():
        options = [f"**{name}**" if defaults.get(group) == name else name for name in group_options(group)]
        rows.append([code(group), meaning, ", ".join(options)])
    return table(["group", "chooses", "options (default in bold)"], rows)


def options_part() -> str:
    parts = []
    for group, meaning in group_meanings().items():
        rows = [[code(f"{group}={name}"), words] for name, words in group_options(group).items()]
        parts.append(f"**{group}**: {meaning}\n\n" + table(["option", "what it is"], rows))
    return "\n\n".join(parts)


def keys_part() -> str:
    defaults, meanings = _default_config(), field_meanings()
    sections = [name for name, hint in get_type_hints(Config).items() if dataclasses.is_dataclass(hint)]
    parts = []
    for section in ["", *sections]:
        node = getattr(defaults, section) if section else defaults
        rows = [
            [
                code(f"{section}.{name}".lstrip(".")),
                _type_text(hint),
                code(_value_text(getattr(node, name))),
                meanings[type(node).__name__, name],
            ]
            for name, hint in get_type_hints(type(node)).items()
            if not dataclasses.is_dataclass(hint)
        ]
        parts.append(f"### {section or 'top level'}\n\n" + table(["key", "value", "default", "meaning"], rows))
    return "\n\n".join(parts)


def _default_config() -> Config:
    (job,) = compose_command(parse_arguments([])).jobs
    return job.config


def _type_text(hint: Any) -> str:
    inner = unwrapped(hint)
    optional = " or null" if inner is not hint else ""
    if isinstance(inner, type) and issubclass(inner, Enum):
        return ", ".join(code(member.name) for member in inner) + optional
    if get_origin(inner) is list:
        return f"list of {_type_text(get_args(inner)[0])}s{optional}"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if inner in names:
        return names[inner] + optional
    return "keys and values" if get_origin(inner) is dict else "text, number or list"


def _value_text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.name)
    return json.dumps(value)


# --- memory options


def sites_part() -> str:
    rows = [
        [
            code(site.name),
            site.holds,
            _formula(site.bytes_of),
            f"{site.bytes_of(LLAMA_LAYER) / MIB:.0f}" if site.bytes_of(LLAMA_LAYER) else "",
            site.recompute or "only within a region",
            _users(site.name),
        ]
        for site in SITES.values()
    ]
    header = ["site", "tensor", "bytes a layer", "MiB, Llama-3-8B layer", "to make it again", "named by"]
    return table(header, rows)


def _formula(bytes_of: Callable[[LayerShape], int]) -> str:
    """The closed form that gives the same number."""
    found = [text for text, form in _FORMULAS.items() if form(_ODD_LAYER) == bytes_of(_ODD_LAYER)]
    if len(found) != 1:
        sys.exit(f"docs/generate.py: {len(found)} formulas give the bytes of a site; mend _FORMULAS")
    return found[0]


def _users(site: str) -> str:
    named = [
        f"{key}: " + ", ".join(code(module.name) for module in modules.values() if site in module.sites)
        for key, modules in (("recompute", RECOMPUTE_MODULES), ("offload", OFFLOAD_MODULES))
        if any(site in module.sites for module in modules.values())
    ]
    return "; ".join(named)


def _modules_part(modules: Mapping[str, Module]) -> str:
    rows = [[code(name), module.means, _acts_on(module)] for name, module in modules.items()]
    return table(["module", "what it names", "acts on"], rows)


def _acts_on(module: Module) -> str:
    if not module.region:
        return ", ".join(code(site) for site in module.sites)
    return "region; nothing kept of " + ", ".join(code(site) for site in INSIDE_REGION[module.region])


def absent_part() -> str:
    return table(["module", "refused because"], [[code(name), reason] for name, reason in ABSENT_MODULES.items()])


# --- results


def pairs_h200_part() -> str:
    rows = json.loads(PAIRS_H200.read_text())["rows"]
    return table(
        ("recompute", "offload", "peak allocated GiB", "offloaded GiB a step", "step ms", "same losses to the bit"),
        [
            (
                code(row["recompute"]),
                code(row["offload"]),
                f"{row['peak_allocated_bytes'] / 2**30:.1f}",
                f"{row['offloaded_bytes'] / 2**30:.1f}",
                f"{row['step_s'] * 1e3:.0f}",
                "yes" if row["losses_equal"] else "NO",
            )
            for row in rows
        ],
    )


def pairs_part() -> str:
    measured = json.loads(PAIRS.read_text())
    base = measured["pairs"][0]["peak_saved_bytes"]
    rows = [
        [
            code(pair["recompute"]),
            code(pair["offload"]),
            f"{pair['peak_saved_bytes'] / MIB:.1f}",
            f"{pair['peak_saved_bytes'] / base:.0%}",
            *(f"{pair[f'{what}_bytes'] / MIB:.1f}" for what in ("kept", "offloaded", "recomputed")),
            f"{pair['val_loss']:.6f}",
            "yes" if pair["same_losses"] else "NO",
        ]
        for pair in measured["pairs"]
    ]
    header = ["recompute", "offload", "peak saved", "of none", "kept", "offloaded", "recomputed"]
    return table([*header, f"val loss, {measured['steps']} steps", "same losses to the bit"], rows)


def predicted_part() -> str:
    rows, measured = [], json.loads(PLANS_H200.read_text())
    settings = {name: make_setting(config_of(*told), has_cuda=True) for name, told in measured["settings"].items()}
    for row in measured["rows"]:
        pipeline = settings[row["experiment"]].pipeline
        found, keep = predict(pipeline, Plan.from_yaml(row["plan"])), pipeline.keep
        slower = found.step_s / keep.step_s - 1
        rows.append(
            [
                row["experiment"][-1],
                row["name"],
                f"{found.peak_bytes / 2**30:.2f}",
                f"{row['peak_gib']:.2f}",
                f"{slower:.1%}" if slower else f"{keep.step_s * 1e3:.0f} ms",
                f"{row['slower']:.1%}" if row["slower"] else f"{row['step_ms']:.0f} ms",
            ]
        )
    header = ("setting", "plan", "predicted GiB", "measured GiB", "predicted over keep", "measured over keep")
    return table(header, rows)


def scale_part() -> str:
    measured = json.loads(SCALE.read_text())

    def cells(found: Mapping[str, float]) -> list[str]:
        return [f"{found['peak_bytes'] / 2**30:.1f}", f"{found['step_s']:.2f}", f"{found['mfu']:.1%}"]

    header = ["", "micro-batch"]
    for name in ("keep", "full", "auto"):
        header += [f"{name} GiB", "step s", "MFU"]
    rows = [
        [
            code(row["experiment"]),
            str(row["micro_batch_size"]),
            *cells(row["keep"]),
            *cells(row["full"]),
            *cells(row["auto"]),
        ]
        for row in measured["rows"]
    ]
    return table(header, rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "groups": groups_part,
    "options": options_part,
    "keys": keys_part,
    "sites": sites_part,
    "recompute-modules": lambda: _modules_part(RECOMPUTE_MODULES),
    "offload-modules": lambda: _modules_part(OFFLOAD_MODULES),
    "absent-modules": absent_part,
    "pairs": pairs_part,
    "pairs-gpu": pairs_h200_part,
    "predicted": predicted_part,
    "scale": scale_part,
}


def filled(text: str) -> str:
    """The page with each of its generated parts made anew."""
    return _PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}", text)


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Pages that are not as they should be, with what they should be."""
    for page in PAGES:
        text = page.read_text()
        fresh = filled(text)
        if fresh != text:
            yield page, fresh


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill the generated parts of the pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    check = parser.parse_args().check
    stale = list(stale_pages())
    for page, fresh in stale:
        if not check:
            page.write_text(fresh)
        print(f"{page.relative_to(ROOT)}: {'stale, run python docs/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
