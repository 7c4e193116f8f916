"""Who this process is among a run's processes, where Slurm started them instead of torchrun. Imports no torch."""

from __future__ import annotations

import os
import zlib


def adopt_ranks() -> None:
    """In a task of submitit's with others beside it, set the variables that torchrun would have set.

    All tasks of a job meet on its first host, at a port made of the job's id.
    """
    if "RANK" in os.environ or "SUBMITIT_EXECUTOR" not in os.environ:
        return
    import submitit

    task = submitit.JobEnvironment()
    if task.num_tasks == 1:
        return
    os.environ |= {
        "RANK": str(task.global_rank),
        "LOCAL_RANK": str(task.local_rank),
        "WORLD_SIZE": str(task.num_tasks),
        "LOCAL_WORLD_SIZE": str(task.num_tasks // task.num_nodes),
        "MASTER_ADDR": task.hostnames[0] if task.num_nodes > 1 else "localhost",
        "MASTER_PORT": str(20_000 + zlib.crc32(task.job_id.encode()) % 10_000),
    }
