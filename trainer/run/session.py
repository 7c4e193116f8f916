"""A whole run: join the world, build everything, train, report, and leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import models.cpu
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.plan import write_estimate
from trainer.report.observer import Observer, RunEnd
from trainer.run import checkpoint, state
from trainer.run.about import measured_fingerprint, run_info
from trainer.run.baseline import LeadIn, choose
from trainer.run.build import Built, build
from trainer.run.data.batches import Batches
from trainer.run.data.samples import SampleSource, open_samples
from trainer.run.distributed import batch_shape, seed_generators, world
from trainer.run.fit import fits
from trainer.run.link import measure_link
from trainer.run.loop import RunResult, Start, run_loop
from trainer.run.planned import planned_steps
from trainer.run.profile import Profile
from trainer.run.pulse import pulse
from trainer.run.stop import StopRequest
from trainer.run.watch import Watch


def train(config: Config, output_dir: Path, resolved_yaml: str, observer: Observer) -> RunResult:
    """Run one configuration to its end. Every process of the world calls it; another run may follow in the same one.

    SIGTERM or SIGINT ends it after the step in hand, with a checkpoint.

    Args:
        output_dir: the run's folder, on a file system that all processes share.
        resolved_yaml: the configuration as YAML, kept inside each checkpoint for whoever finds it there.

    Raises:
        ConfigError: something that only the data, the world or a checkpoint can show to be wrong.
    """
    if not torch.cuda.is_available():
        models.cpu.install()
    with (
        StopRequest() as stop,
        world(config) as here,
        pulse(here.rank, here.size, lambda lost: observer.run_ended(RunEnd("failed", None, lost))) as ranks,
    ):
        source = open_samples(config)
        vocab_size = model_vocab_size(config, source)
        batches = Batches(source, batch_shape(config), vocab_size, config.trainer.eval_batches, here.device)
        built = build(config, here, batches, vocab_size)
        identity = state.fingerprint(
            config, world_size=here.size, vocab_size=vocab_size, samples_in_pass=source.block_length
        )
        split = state.layout(config, here.size)
        folder = output_dir / "checkpoints"
        start = _start(config, folder, built, identity, split)
        tokens_per_step = batches.shape.global_batch * config.model.seq_length

        def save(step: int, consumed: int, losses: list[float]) -> None:
            if built.optimizer is None:  # optim=none: the weights are those of the first step
                return
            progress = checkpoint.Progress(step, consumed, built.scheduler.num_steps, losses, identity, split)
            sharded = state.sharded_state(built.chunks, built.optimizer, loading=False)
            checkpoint.save(folder, progress, resolved_yaml, sharded, config.trainer.checkpoint_keep)

        alike = measured_fingerprint(config, here, vocab_size, batches.shape.global_batch)
        baseline = choose(
            config.baseline,
            built.memory.plan,
            steps=config.trainer.steps - start.step,
            resume=config.resume,
            fingerprint=alike,
            fits=lambda plan: fits(plan, config, vocab_size, built.memory.chunks),
        )
        lead_in = LeadIn(baseline, built.memory.plan, built.memory.switch)
        copies = built.memory.plan is not None and any(layer.offload for layer in built.memory.plan.layers)
        link = measure_link(here.device) if copies else None
        watch = Watch(
            config,
            memory=built.memory,
            chunks=built.chunks,
            optimizer=built.optimizer,
            choice=baseline,
            first_step=start.step + 1,
            vocab_size=vocab_size,
            micro_batches=batches.shape.micro_batches,
            link=link,
            device=here.device,
        )
        profile = Profile(
            config.profile,
            built.memory.chunks,
            output_dir,
            rank=here.rank,
            lead_in=baseline.steps,
            steps=config.trainer.steps - start.step,
        )
        if here.rank == 0:
            write_estimate(config, here.on_gpu, output_dir)
        observer.run_started(
            run_info(
                config,
                output_dir,
                here,
                vocab_size,
                tokens_per_step,
                start,
                plan=built.memory.plan,
                baseline=baseline,
                fingerprint=alike,
            )
        )
        try:
            end = run_loop(
                config.trainer,
                start,
                planned_steps(config, built, here.device, output_dir),
                observer,
                global_batch=batches.shape.global_batch,
                tokens_per_step=tokens_per_step,
                save=save,
                effects=built.memory.effects,
                under=lead_in.under,
                watch=watch,
                profile=profile,
                stop=stop,
            )
        except BaseException as error:
            if ranks and isinstance(error, Exception) and not isinstance(error, ConfigError):
                ranks.explain(error)
            observer.run_ended(RunEnd("failed", None, f"{type(error).__name__}: {error}"))
            raise
        observer.run_ended(RunEnd(end.status, end.val_loss, end.message))
        return end


def model_vocab_size(config: Config, source: SampleSource) -> int:
    """Token ids that the model knows, before padding: the data's, or model.vocab_size where that is larger.

    Raises:
        ConfigError: model.vocab_size is too small for the data.
    """
    wanted = config.model.vocab_size
    if wanted is None:
        return source.vocab_size
    if wanted < source.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{wanted} is less than the {source.vocab_size} token ids of the data",
            "Leave it out, or choose another data.tokenizer",
        )
    return wanted


def _start(config: Config, own_folder: Path, built: Built, identity: dict[str, Any], split: dict[str, Any]) -> Start:
    """The beginning, or the newest checkpoint of the run that `resume` names, loaded. Collective."""
    if dist.get_rank() == 0:
        checkpoint.clean(own_folder)
    found = checkpoint.newest(own_folder)
    if config.resume is None:
        if found is not None:
            raise ConfigError(
                "hydra.run.dir",
                f"{own_folder.parent} holds checkpoints of an earlier run",
                f"Go on from them with resume={own_folder.parent}, or choose another folder",
            )
        return Start(0, 0, [])
    folder = Path(config.resume).expanduser() / "checkpoints"
    found = checkpoint.newest(folder)
    if found is None:
        raise ConfigError(
            "resume", f"there is no whole checkpoint in {folder}", "Give the folder of a run that saved one"
        )
    progress = checkpoint.read_progress(found)
    checkpoint.refuse_if_different(progress.fingerprint, identity)
    if progress.step >= config.trainer.steps:
        raise ConfigError(
            "trainer.steps",
            f"the checkpoint already stands at step {progress.step} of {config.trainer.steps}",
            "Ask for more steps",
        )
    same_split = progress.layout == split
    if not same_split:  # the saved generators are other ranks', and those of the first step would repeat its dropout
        seed_generators(config.trainer.seed + progress.step)
    wanted = state.sharded_state(built.chunks, built.optimizer, loading=True, with_generators=same_split)
    loaded = checkpoint.load(found, wanted)
    state.restore(loaded, built.chunks, built.optimizer)
    built.scheduler.num_steps = 0
    built.scheduler.step(increment=progress.scheduler_samples)
    return Start(progress.step, progress.consumed_samples, list(progress.losses))
