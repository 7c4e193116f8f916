"""Measure the parallel layouts of two GPUs of one host under four plans each, and whether their links contend.

    python docs/measure_ranks.py OUT [tiny]

One process group for each layout runs all its plans one after the other, as starting costs more than a run. Writes
OUT/ranks.json; the run that counts is docs/results/two-gpus.json. tiny: a model for a CPU, to try the script.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: name -> processes, overrides; four micro-batches a step everywhere, so that all see the same batches
LAYOUTS = {
    "single": (1, "parallel=single"),
    "tensor2": (2, "parallel=tensor2 parallel.sequence_parallel=true"),
    "pipeline2": (2, "parallel=pipeline2"),
    "interleaved2": (2, "parallel=interleaved2"),
    "data2": (2, "parallel=data parallel.distributed_optimizer=true"),
}
#: native full comes first: its peak is the budget of ours
PLANS = {
    "native_full": "engine=megatron recompute=full",
    "keep": "",
    "ours": "plan=auto plan.budget={budget_gib}GiB",
    "native_fine_grained": "engine=megatron offload=fine_grained",
}
COMMON = "data=mock optim=adam trainer.eval_batches=0 logger=none baseline=off guard=none"
SETTING_A = (
    "model=llama3_8b model.num_layers=8 model.vocab_size=32000 data.vocab_size=32000 model.seq_length=4096 "
    "trainer.micro_batch_size=4 trainer.global_batch_size=16 trainer.steps=6"
)
TINY = "model=tiny trainer.micro_batch_size=2 trainer.global_batch_size=8 trainer.steps=3"
FIGURES = ("status", "losses", "step_s", "forward_s", "backward_s", "mfu", "offloaded_bytes", "recomputed_bytes")
COPY_BYTES = 1 << 30


def run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """One run in this process, which torchrun started; result.json's figures and all ranks' peaks on every rank."""
    import torch
    import torch.distributed as dist

    from trainer.config.arguments import parse_arguments
    from trainer.config.compose import compose_command, prepare
    from trainer.config.preview import resolved_yaml
    from trainer.report.reporter import Reporter
    from trainer.run import session

    peaks: list[Any] = [None]

    class Watcher(Reporter):
        """Asks all ranks for their peaks while they are still joined."""

        def run_ended(self, end: Any) -> None:
            if end.status == "completed":
                own = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
                peaks[:] = [None] * dist.get_world_size()
                dist.all_gather_object(peaks, own)
            super().run_ended(end)

    try:
        command = parse_arguments(arguments)
        prepare(command)
        (job,) = compose_command(command).jobs
        with Watcher(job.config, folder, resolved_yaml(job.resolved)) as reporter:
            session.train(job.config, folder, "", reporter)
    except Exception as error:
        return {"status": "failed", "message": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    time.sleep(1)  # rank 0 writes, all read
    result = json.loads((folder / "result.json").read_text())
    return {key: result[key] for key in FIGURES} | {
        "peak_bytes": peaks,
        "versions": result["versions"],
        "hardware": result["hardware"],
    }


def measure_layout(layout: str, out: Path, setting: str) -> None:
    """All plans of one layout; every rank of its group calls it."""
    rank, rows, budget_bytes = int(os.environ["RANK"]), {}, 0
    for plan, overrides in PLANS.items():
        given = overrides.format(budget_gib=round(budget_bytes / (1 << 30), 2))
        arguments = f"{setting} {COMMON} {LAYOUTS[layout][1]} {given}".split()
        rows[plan] = run(arguments, out / layout / plan) | {"overrides": given}
        if plan == "native_full":
            budget_bytes = max((peak or 1 << 30 for peak in rows[plan].get("peak_bytes", ())), default=1 << 30)
        if rank == 0:
            row = rows[plan]
            print(layout, plan, row["status"], row.get("step_s"), row.get("peak_bytes"), row.get("message"), flush=True)
            (out / f"{layout}.json").write_text(json.dumps(rows, indent=1) + "\n")


def measure_link(out: Path) -> None:
    """GB/s of copies on rank 0: alone, beside rank 1's, beside an all-reduce of both, beside both."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    summand = torch.ones(1 << 28, device="cuda")
    copies = torch.cuda.Stream()

    def rate(kind: str, copying: bool, reducing: bool) -> float | None:
        target, source = (host, device) if kind == "d2h" else (device, host)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        if reducing:
            for _ in range(60):
                dist.all_reduce(summand)
        if copying:
            with torch.cuda.stream(copies):
                begin.record()
                for _ in range(8):
                    target.copy_(source, non_blocking=True)
                end.record()
        torch.cuda.synchronize()
        return 8 * COPY_BYTES / begin.elapsed_time(end) / 1e6 if copying else None

    found = {}
    for kind in ("d2h", "h2d"):
        rate(kind, True, True)
        for name, both, reducing in (
            ("alone", False, False),
            ("while the other copies", True, False),
            ("while NCCL works", False, True),
            ("while the other copies and NCCL works", True, True),
        ):
            found[f"{kind} {name}"] = rate(kind, both or rank == 0, reducing)
    if rank == 0:
        print(found, flush=True)
        (out / "link.json").write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    out, tiny = Path(sys.argv[1]).resolve(), "tiny" in sys.argv[2:]
    if "RANK" in os.environ:
        what = sys.argv[-1]
        if what == "link":
            measure_link(out)
        else:
            measure_layout(what, out, TINY if tiny else SETTING_A)
        return
    out.mkdir(parents=True, exist_ok=True)
    for what in (*LAYOUTS, "link"):
        processes = LAYOUTS[what][0] if what in LAYOUTS else 2
        if what == "link" and tiny:
            continue
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
                *(__file__, str(out), *(["tiny"] if tiny else []), what),
            ],
            cwd=ROOT,
            env=os.environ | {"NVTE_CPU_OFFLOAD_V1": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            check=False,
        )
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "ranks"}
    (out / "ranks.json").write_text(json.dumps({"setting": TINY if tiny else SETTING_A} | parts, indent=1) + "\n")


if __name__ == "__main__":
    main()
