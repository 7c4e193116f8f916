"""Every memory option under every layout: run_pairs_worker.py JOBS. Not collected by pytest.

JOBS is a pickled {number of processes: {layout: {pair: Config}}}; the first pair of a layout keeps everything. Found
is a {layout: [{pair: Outcome} of each rank]}, pickled into JOBS.found. Ranks are forked from a process that has
imported everything, which takes longer than what they do.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import models.cpu
from trainer.config.schema import Config
from trainer.run.build import build
from trainer.run.data.batches import Batches
from trainer.run.data.samples import open_samples
from trainer.run.distributed import World, batch_shape, seed_generators, world

STEPS = 2


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    #: gradients and updated parameters that differ from the layout's first pair, by "step name"
    different: list[str] = field(default_factory=list)
    compared: int = 0
    peak_saved_bytes: int = 0
    #: still held for backward when the steps are done
    held_bytes: int = 0


def run(config: Config, reference: dict[str, torch.Tensor]) -> Outcome:
    """Two optimizer steps under a configuration. An empty `reference` is filled, any other compared with."""
    here = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    seed_generators(config.trainer.seed)
    source = open_samples(config)
    batches = Batches(source, batch_shape(config), source.vocab_size, 0, here.device)
    built = build(config, here, batches, source.vocab_size)
    outcome, fills = Outcome(), not reference
    for step in range(STEPS):
        done = built.stepper.train(step * batches.shape.global_batch, lambda: False, metered=False)
        outcome.losses.append(done.loss)
        outcome.peak_saved_bytes = max(outcome.peak_saved_bytes, done.memory.peak_saved_bytes)
        for number, chunk in enumerate(built.chunks):
            for name, parameter in chunk.named_parameters():
                gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
                for kind, tensor in (("gradient", gradient), ("parameter", parameter.data)):
                    key = f"{step} {kind} {number} {name}"
                    if fills:
                        reference[key] = tensor.clone()
                    elif not torch.equal(reference[key], tensor):
                        outcome.different.append(key)
                    outcome.compared += 1
    outcome.held_bytes = built.memory.held_bytes
    return outcome


def rank(number: int, size: int, port: int, layouts: dict[str, dict[str, Config]], found: str) -> None:
    """One of `size` processes, which runs all layouts."""
    os.environ |= {"RANK": f"{number}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    outcomes: dict[str, dict[str, Outcome]] = {}
    for layout, pairs in layouts.items():
        reference: dict[str, torch.Tensor] = {}
        with world(next(iter(pairs.values()))):
            outcomes[layout] = {pair: run(config, reference) for pair, config in pairs.items()}
    Path(f"{found}.{size}.{number}").write_bytes(pickle.dumps(outcomes))


def main(jobs_path: str) -> None:
    # the name under which pytest's process knows Outcome
    sys.modules["tests.trainer.run.run_pairs_worker"] = sys.modules["__main__"]
    Outcome.__module__ = "tests.trainer.run.run_pairs_worker"
    models.cpu.install()
    found: dict[str, list[dict[str, Outcome]]] = {}
    for size, layouts in pickle.loads(Path(jobs_path).read_bytes()).items():
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        start_processes(rank, (size, port, layouts, jobs_path), nprocs=size, start_method="fork")
        ranks = [pickle.loads(Path(f"{jobs_path}.{size}.{number}").read_bytes()) for number in range(size)]
        found |= {layout: [outcomes[layout] for outcomes in ranks] for layout in layouts}
    Path(f"{jobs_path}.found").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
