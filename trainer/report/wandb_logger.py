"""Logs a run to Weights & Biases, which may fail or be away at any time without the run taking notice."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer.config.schema import Config, WandbMode
from trainer.report.launch import Launch
from trainer.report.metrics import flat
from trainer.report.wandb_mode import has_credentials, wandb_mode

log = logging.getLogger(__name__)

ID_FILE = "wandb_id"

#: seconds that the server may take before the run goes on without it, and to take the rest of the data at the end
INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60

_Mode = Literal["online", "offline"]

STEP = "trainer/step"
_MAX_TAG_LENGTH = 64

#: what to try, in order
_ATTEMPTS: dict[WandbMode, tuple[_Mode, ...]] = {
    WandbMode.online: ("online", "offline"),
    WandbMode.offline: ("offline",),
    WandbMode.disabled: (),
}

_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "val_loss": "val/loss",
    "tokens_per_s": "perf/tokens_per_s",
    "model_flops_per_s": "perf/model_flops_per_s",
    "mfu": "perf/mfu",
    "step_s": "perf/step_s",
    "forward_s": "perf/forward_s",
    "backward_s": "perf/backward_s",
    "optimizer_s": "perf/optimizer_s",
    "peak_saved_bytes": "memory/peak_saved_bytes",
    "kept_bytes": "memory/kept_bytes",
    "offloaded_bytes": "memory/offloaded_bytes",
    "recomputed_bytes": "memory/recomputed_bytes",
    "peak_allocated_bytes": "memory/peak_allocated_bytes",
    "rss_bytes": "memory/rss_bytes",
}


class WandbLogger:
    """One wandb run. After its first failure it says so once and does nothing more."""

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        run_config: Mapping[str, Any],
        launch: Launch,
        job_type: Literal["train", "sweep"] = "train",
    ) -> None:
        """`run_config` is what the run's page shows as its configuration: plain nested data."""
        self._run: Any = None
        settings = config.logger
        credentials = has_credentials(settings.base_url, os.environ)
        mode = wandb_mode(settings.wandb_mode, os.environ.get("WANDB_MODE"), credentials)
        if settings.wandb_mode is WandbMode.online and mode is not WandbMode.online:
            log.warning("wandb: no credentials found, logging offline")
        for attempt in _ATTEMPTS[mode]:
            try:
                self._run = _start(attempt, config, output_dir, run_config, launch, job_type)
            except Exception as error:  # whatever goes wrong in wandb, training goes on
                log.warning("wandb: %s did not start: %s", attempt, _one_line(error))
                _end_service()
            else:
                break

    def log(self, row: Mapping[str, Any]) -> None:
        """`row` as in metrics.jsonl, with its "step"; what is None is left out."""
        values = {_NAMES[key]: value for key, value in row.items() if key in _NAMES and value is not None}
        self._guarded(lambda run: run.log({STEP: row["step"], **values}))

    def log_interval(self, row: Mapping[str, Any]) -> None:
        """`row` as interval_metrics makes it, under interval/..., nested names joined by slashes."""
        values = {f"interval/{key}": value for key, value in flat(row).items() if value is not None and key != "step"}
        self._guarded(lambda run: run.log({STEP: row["step"], **values}))

    def show_sweep(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], pictures: Sequence[Path]) -> None:
        def put(run: Any) -> None:
            import wandb

            run.log({"sweep/jobs": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._guarded(put)
        self.show_pictures("sweep", pictures)

    def show_pictures(self, section: str, pictures: Sequence[Path]) -> None:
        def put(run: Any) -> None:
            import wandb

            run.log({f"{section}/{picture.stem}": wandb.Image(str(picture)) for picture in pictures})

        if pictures:
            self._guarded(put)

    def finish(self, final: Mapping[str, Any], succeeded: bool) -> None:
        """Puts `final` into the run's summary and ends it; the server gets FINISH_TIMEOUT_S to take the rest."""

        def end(run: Any) -> None:
            run.summary.update({key: value for key, value in final.items() if value is not None})
            run.finish(exit_code=0 if succeeded else 1)

        self._guarded(end)
        self._run = None

    def _guarded(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # as above
            log.warning("wandb: %s; nothing more is logged there", _one_line(error))
            self._run = None
            _end_service()


def run_name(config: Config, launch: Launch) -> str:
    parts = [config.model.name, config.recompute.granularity.value, config.offload.kind.value]
    if launch.job_number is not None:
        parts.append(str(launch.job_number))
    return config.logger.name or "-".join(parts)


def run_group(config: Config, launch: Launch) -> str | None:
    """Runs of one sweep belong together, else those of one experiment."""
    return config.logger.group or launch.sweep or launch.choices.get("experiment")


def run_tags(config: Config, launch: Launch) -> list[str]:
    """The chosen option of every config group, then the user's own tags."""
    chosen = [f"{group}={option}" for group, option in sorted(launch.choices.items())]
    return [tag[:_MAX_TAG_LENGTH] for tag in dict.fromkeys([*chosen, *config.logger.tags])]


def _start(
    mode: _Mode, config: Config, output_dir: Path, run_config: Mapping[str, Any], launch: Launch, job_type: str
) -> Any:
    # wandb's telemetry about itself holds up the end of the process half a minute when the server is silent
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wanted: dict[str, Any] = {
        "init_timeout": INIT_TIMEOUT_S if mode == "online" else None,
        "finish_timeout": FINISH_TIMEOUT_S,
        "console": "off",
        "silent": True,
        "base_url": config.logger.base_url,
    }
    # finish_timeout is younger than the oldest wandb that we run with
    known = {key: value for key, value in wanted.items() if value is not None and key in wandb.Settings.model_fields}
    run = wandb.init(
        mode=mode,
        dir=str(output_dir.resolve()),
        id=_run_id(output_dir),
        resume="allow" if mode == "online" else None,
        project=config.logger.project,
        entity=config.logger.entity,
        group=run_group(config, launch),
        job_type=job_type,
        name=run_name(config, launch) if job_type == "train" else f"sweep {launch.sweep}",
        tags=run_tags(config, launch),
        notes=" ".join(launch.overrides) or None,
        config=dict(run_config),
        reinit="finish_previous",
        settings=wandb.Settings(**known),
    )
    run.define_metric(STEP)
    for pattern in ("train/*", "perf/*", "memory/*", "interval/*", "val/*"):
        run.define_metric(pattern, step_metric=STEP)
    run.define_metric("val/loss", step_metric=STEP, summary="min")
    for name in ("memory/peak_saved_bytes", "memory/peak_allocated_bytes"):
        run.define_metric(name, step_metric=STEP, summary="max")
    where = run.url if mode == "online" else f"offline; to send it: wandb sync {Path(run.dir).parent}"
    log.info("wandb: %s", where)
    return run


def _end_service() -> None:
    """Ends wandb's service process: it holds the run's id as "in use", and, if dead, complains when Python exits."""
    try:
        import wandb

        wandb.teardown()
    except Exception as error:
        log.debug("wandb: %s", _one_line(error))


def _run_id(output_dir: Path) -> str:
    """One id for a run's folder, so that a restarted run goes on in the same wandb run."""
    path = output_dir / ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
