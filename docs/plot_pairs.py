"""Draw docs/results/pairs-cpu.json as pairs-cpu.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 1 << 20
PEAK, KEPT, OFFLOADED, RECOMPUTED = "#1b3a57", "#4c8dbf", "#e8a33d", "#7fb069"


def draw(measured: dict[str, Any], target: Path) -> None:
    pairs = measured["pairs"][::-1]  # the first pair on top
    rows = range(len(pairs))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, width_ratios=(3, 4))
    peaks = [pair["peak_saved_bytes"] / MIB for pair in pairs]
    left.barh(rows, peaks, color=PEAK, height=0.65)
    for row, peak in zip(rows, peaks, strict=True):
        left.text(peak, row, f" {peak:.0f} MiB   {peak / peaks[-1]:.0%}", va="center", fontsize=9)
    left.set_xlim(0, max(peaks) * 1.4)
    left.set_title("Most held on the device for backward", loc="left", fontsize=11)
    left.set_yticks(rows, [f"{pair['recompute']} + {pair['offload']}" for pair in pairs])
    left.set_ylabel("recompute + offload")

    starts = [0.0] * len(pairs)
    for what, color in (("kept", KEPT), ("offloaded", OFFLOADED), ("recomputed", RECOMPUTED)):
        widths = [pair[f"{what}_bytes"] / MIB for pair in pairs]
        right.barh(rows, widths, left=starts, color=color, height=0.65, label=what)
        for row, start, width in zip(rows, starts, widths, strict=True):
            if width > 6:
                right.text(start + width / 2, row, f"{width:.0f}", va="center", ha="center", fontsize=9)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    right.set_title("What one step did with the saved tensors", loc="left", fontsize=11)
    right.legend(frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.1))
    for axes in (left, right):
        axes.set_xlabel("MiB", loc="right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    same = all(pair["same_losses"] for pair in pairs)
    figure.suptitle(
        f"One model, nine ways to hold its activations: "
        f"{'the same' if same else 'NOT the same'} {measured['steps']} losses to the last bit",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    device = measured["hardware"]["device"]
    figure.text(
        0.01,
        0.01,
        f"model={measured['model']}, {measured['tokens_per_step']} tokens a step, fp32, CPU ({device}), "
        f"offload emulated; torch {measured['versions']['torch']}, {measured['date']}",
        fontsize=8,
        color="#555555",
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.98))
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    draw(json.loads((RESULTS / "pairs-cpu.json").read_text()), RESULTS / "pairs-cpu.png")
