"""Facts on the computer that a run ran on. Imports no torch."""

from __future__ import annotations

import os


def host_facts() -> dict[str, int]:
    """cores that this process may use, and bytes of the host's memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cores": cores, "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
