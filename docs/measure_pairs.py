"""Train the default model under each pair of recompute and offload, one process each, and record what each run wrote.

    python docs/measure_pairs.py [steps]

writes docs/results/pairs-cpu.json. Run it on a machine without a GPU, with nothing else at work.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "results" / "pairs-cpu.json"

RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "fine_grained", "layerwise")
FIGURES = (
    "val_loss",
    "peak_saved_bytes",
    "kept_bytes",
    "offloaded_bytes",
    "recomputed_bytes",
    "step_s",
    "forward_s",
    "backward_s",
)


def run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Train once and read the run's result.json."""
    command = [sys.executable, "train.py", *arguments, "logger=none", f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def measure(steps: int, folder: Path) -> dict[str, Any]:
    results = {
        (recompute, offload): run(
            [f"recompute={recompute}", f"offload={offload}", f"trainer.steps={steps}"],
            folder / f"{recompute}-{offload}",
        )
        for recompute, offload in itertools.product(RECOMPUTE, OFFLOAD)
    }
    first = results["none", "none"]
    if first["peak_allocated_bytes"] is not None:
        sys.exit("this machine has a GPU: these figures are of the CPU")
    return {
        "command": f"python docs/measure_pairs.py {steps}",
        "date": first["started_at"][:10],
        "model": first["model"],
        "steps": steps,
        "tokens_per_step": first["tokens_per_step"],
        "versions": first["versions"],
        "hardware": first["hardware"],
        # JSON keeps every digit of a double, so equal here is equal to the last bit
        "losses": first["losses"],
        "pairs": [
            {"recompute": recompute, "offload": offload, "same_losses": result["losses"] == first["losses"]}
            | {key: result[key] for key in FIGURES}
            for (recompute, offload), result in results.items()
        ],
    }


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(steps, Path(folder))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
