"""Runs in processes of their own, one or torchrun's: run_worker.py JOBS [MARKER]. Not collected by pytest.

JOBS is a pickled list of Job. Each rank pickles its results into JOBS.<rank>. With a MARKER, the checkpoint of step 6
makes that file when all is written, and then waits to be killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from trainer.config.schema import Config


@dataclass(frozen=True)
class Job:
    config: Config
    folder: Path
    #: rank that gets a SIGTERM, and the step after which it comes
    terminated: tuple[int, int] | None = None


def run(jobs: list[Job]) -> list[object]:
    from tests.trainer.run.run_recorder import Recorder
    from trainer.run.session import train

    rank = int(os.environ.get("RANK", "0"))
    ends: list[object] = []
    for job in jobs:

        def on_step(step: int, terminated: tuple[int, int] | None = job.terminated) -> None:
            if terminated == (rank, step):
                os.kill(os.getpid(), signal.SIGTERM)

        ends.append(train(job.config, job.folder, "", Recorder(on_step)))
    return ends


def hesitate_at(marker: Path) -> None:
    rename = os.rename

    def hesitate(draft: Path, final: Path) -> None:
        if final.name == "step_00000006":
            marker.touch()
            time.sleep(600)
        rename(draft, final)

    os.rename = hesitate  # type: ignore[assignment]


def main(jobs_path: str, marker: str | None = None) -> None:
    # the name under which pytest's process knows Job
    sys.modules["tests.trainer.run.run_worker"] = sys.modules["__main__"]
    if marker is not None:
        hesitate_at(Path(marker))
    ends = run(pickle.loads(Path(jobs_path).read_bytes()))
    Path(f"{jobs_path}.{os.environ.get('RANK', '0')}").write_bytes(pickle.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
