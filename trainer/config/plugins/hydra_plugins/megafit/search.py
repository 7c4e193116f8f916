"""hydra/sweeper=search: Optuna draws the jobs of a sweep one after the other, for the least `objective` under a budget.

Not hydra-optuna-sweeper: that one needs Optuna 2 and lets a failing job end the search.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from trainer.config.errors import ConfigError, RunFailed
from trainer.report.records import write_pruned
from trainer.report.sweep import Job, read_job
from trainer.report.units import bytes_text

log = logging.getLogger(__name__)

#: what the search came to, in the sweep's folder
SEARCH = "search.yaml"
#: draws for each trial: of few values Optuna soon draws the same again, which costs no run
_DRAWS = 10


# annotations must be types, not texts: Hydra runs this module before Python can look it up by name
@dataclass
class SearchSweeperConf:
    _target_: str = "hydra_plugins.megafit.search.SearchSweeper"
    #: key -> what to draw from: values with commas, choice(), range() or interval()
    params: Optional[Dict[str, Any]] = None
    #: runs, those pruned included
    trials: int = 20
    #: peak memory, as the sweep's report shows it, that a run must not exceed; None: any
    budget_gib: Optional[float] = None
    #: of the sampler
    seed: int = 1234


ConfigStore.instance().store(group="hydra/sweeper", name="search", node=SearchSweeperConf, provider="megafit")


@dataclass(frozen=True)
class _Outcome:
    """What a trial came to; no value: it was pruned, or failed."""

    number: int
    value: Optional[float]
    #: over the budget, out of memory or refused: nothing wrong with the search
    pruned: str = ""
    #: peak over budget, from which Optuna learns how far off it was
    excess: Optional[float] = None


class SearchSweeper(Sweeper):
    def __init__(self, **settings: Any) -> None:
        self._settings = SearchSweeperConf(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: List[str]) -> None:
        """Raises ConfigError when there is nothing to draw from or Optuna is not installed."""
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "hydra/sweeper", "search needs Optuna, which is not installed", "pip install -e '.[search]'"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        fixed, knobs = self._parse(arguments)
        if not knobs:
            raise ConfigError("hydra.sweeper.params", "there is nothing to draw from", "Give a key several values")
        space = {key: _distribution(optuna.distributions, override) for key, override in knobs.items()}
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._settings.seed))
        known: dict[tuple[str, ...], _Outcome] = {}
        for _ in range(self._settings.trials * _DRAWS):
            trial = study.ask(space)
            words = tuple(f"{key}={value}" for key, value in trial.params.items())
            if words not in known:
                if len(known) == self._settings.trials:
                    break
                known[words] = self._run(len(known), [*fixed, *words])
            outcome = known[words]
            if outcome.excess is not None:
                trial.report(outcome.excess, step=0)
            states = optuna.trial.TrialState
            if outcome.value is not None:
                study.tell(trial, outcome.value)
            else:
                study.tell(trial, state=states.PRUNED if outcome.pruned else states.FAIL)
        self._conclude(folder, known)

    def _parse(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Override]]:
        """What every trial is told, and what is drawn; the command line wins over params."""
        params = self._settings.params or {}
        texts = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        parsed = OverridesParser.create(config_loader=self._context.config_loader).parse_overrides(texts)
        last = {override.get_key_element(): override for override in parsed}
        fixed = [str(override.input_line) for override in last.values() if not override.is_sweep_override()]
        return fixed, {key: override for key, override in last.items() if override.is_sweep_override()}

    def _run(self, number: int, overrides: list[str]) -> _Outcome:
        (returned,) = self._launcher.launch([overrides], initial_job_idx=number)
        folder = Path(str(returned.working_dir))
        job, budget_gib = read_job(folder), self._settings.budget_gib
        if returned.status is JobStatus.COMPLETED:
            excess = job.peak_bytes / (budget_gib * (1 << 30)) if budget_gib and job.peak_bytes else None
            if excess is not None and excess > 1:
                log.info("    pruned: over the budget of %g GiB", budget_gib)
                return _Outcome(number, None, "over the budget", excess)
            return _Outcome(number, returned.return_value)
        if job.status == "refused" or job.out_of_memory:
            write_pruned(folder, job.failure)
            return _Outcome(number, None, job.failure)
        return _Outcome(number, None)

    def _conclude(self, folder: Path, known: Mapping[tuple[str, ...], _Outcome]) -> None:
        """Raises RunFailed when no trial counts."""
        values = {outcome.value: (words, outcome) for words, outcome in known.items() if outcome.value is not None}
        pruned = sum(bool(outcome.pruned) for outcome in known.values())
        if not values:
            raise RunFailed(f"none of {len(known)} trials ran within the budget; {pruned} were pruned")
        words, best = values[min(values)]
        job = read_job(folder / str(best.number))
        OmegaConf.save(_summary(self._config.objective.name, words, best, job, len(known), pruned), folder / SEARCH)
        log.info(
            "best of %d trials (%d pruned): #%d  %s, %s %g, peak %s",
            *(len(known), pruned, best.number, " ".join(words), self._config.objective.name, best.value),
            bytes_text(job.peak_bytes),
        )


def _distribution(distributions: Any, override: Override) -> Any:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return distributions.FloatDistribution(value.start, value.end, log="log" in value.tags)
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def _summary(objective: str, words: Sequence[str], best: _Outcome, job: Job, trials: int, pruned: int) -> DictConfig:
    return OmegaConf.create(
        {
            "objective": objective,
            "best": {"job": best.number, "value": best.value, "peak_bytes": job.peak_bytes, "overrides": list(words)},
            "trials": trials,
            "pruned": pruned,
        }
    )
