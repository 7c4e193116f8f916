"""Runs in two processes: recover_worker.py PICKLED_CONFIG. In the second run memory is short on rank 1 alone.

Each rank pickles (losses, most bytes held) of both runs.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))


def main(file: Path) -> None:
    import torch

    from memory.engine.ledger import Ledger
    from tests.trainer.run.run_recorder import Recorder
    from trainer.run.session import train

    config, rank = pickle.loads(file.read_bytes()), int(os.environ["RANK"])

    def run(name: str) -> tuple[list[float], int]:
        watcher = Recorder()
        end = train(config, file.parent / name, "", watcher)
        return end.losses, max(record.memory.peak_saved_bytes for record in watcher.steps)

    roomy = run("roomy")
    grow: Any = Ledger.grow

    def limited(ledger: Ledger, more: int) -> None:
        if ledger.held_bytes + more > 0.8 * roomy[1]:
            raise torch.OutOfMemoryError("artificial")
        grow(ledger, more)

    if rank == 1:
        setattr(Ledger, "grow", limited)  # noqa: B010
    file.with_suffix(f".{rank}").write_bytes(pickle.dumps((roomy, run("tight"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
