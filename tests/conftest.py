import os

# Before torch is imported: pytest -n starts several processes, whose threads would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
