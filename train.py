"""Train a GPT: `python train.py --help` shows what can be chosen."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _check_packages() -> None:
    """Stop if another library's models, memory or trainer would be imported instead of ours."""
    for name in ("models", "memory", "trainer"):
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec else []
        if [Path(place).resolve() for place in places] != [HERE / name]:
            found = f"in {places[0]}" if places else "nowhere"
            print(
                f"error: package {name} is found {found}, not in {HERE}. Run `python {HERE / 'train.py'}` itself, "
                "without another package of that name before it on PYTHONPATH",
                file=sys.stderr,
            )
            sys.exit(2)


_check_packages()

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from trainer.config.arguments import Command, Purpose, parse_arguments  # noqa: E402
from trainer.config.compose import Composition, compose_command, prepare  # noqa: E402
from trainer.config.errors import (  # noqa: E402
    BAD_INPUT,
    ConfigError,
    ConfigErrors,
    RunFailed,
    print_errors,
    raise_if_any,
)
from trainer.config.machine import Machine, hydra_overrides_of_rank, this_machine  # noqa: E402
from trainer.config.options_page import options_page  # noqa: E402
from trainer.config.overrides import quoted  # noqa: E402
from trainer.config.preview import print_explanation, print_preview, resolved_yaml  # noqa: E402
from trainer.config.provenance import with_file  # noqa: E402
from trainer.config.ranks import adopt_ranks  # noqa: E402
from trainer.config.rules import launch_problems, machine_of_jobs, validate  # noqa: E402
from trainer.config.schema import Config  # noqa: E402
from trainer.config.strict import to_config  # noqa: E402


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def _run(composed: DictConfig) -> float | None:
    """One job. Returns what a sweeper minimises."""
    adopt_ranks()
    config = to_config(composed)
    raise_if_any(validate(config, this_machine()))
    from trainer.report.reporter import Reporter
    from trainer.report.sweep import read_job
    from trainer.run.session import train

    output_dir, resolved = Path(HydraConfig.get().runtime.output_dir), resolved_yaml(composed)
    with Reporter(config, output_dir, resolved) as reporter:
        result = train(config, output_dir, resolved, reporter)
    if result.status not in ("completed", "interrupted"):
        raise RunFailed(f"the run {result.status}; {output_dir / 'result.json'} says more")
    return read_job(output_dir).value_of(config.objective.value)


def _hydra(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    _run()


def _sweep(arguments: list[str], folder: str, config: Config) -> int:
    """Run the jobs and report on them, also when they were stopped. Each that failed is named by the report."""
    from trainer.report.sweep_report import report_sweep

    try:
        with suppress(RunFailed):
            _hydra([*arguments, f"hydra.sweep.dir={quoted(folder)}"])
    finally:
        failed = report_sweep(Path(folder), config)
    return 1 if failed else 0


def _train(command: Command, composition: Composition, machine: Machine) -> int:
    config, sweep = composition.jobs[0].config, composition.sweep
    if config.explain is not None:
        print_explanation(composition.jobs)
        return 0
    if not sweep or sweep.check_first:
        _check(composition, machine)
    if any(job.config.validate_only for job in composition.jobs):
        print_preview(composition.jobs, machine)
        return 0
    if config.report is not None:
        from trainer.report.sweep_report import report_sweep

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        report_sweep(Path(config.report), config)
        return 0
    raise_if_any(launch_problems(composition, machine))
    arguments = command.hydra_argv(hydra_overrides_of_rank(machine))
    if sweep:
        return _sweep(arguments, sweep.folder, config)
    _hydra(arguments)
    return 0


def _check(composition: Composition, machine: Machine) -> None:
    machine = machine_of_jobs(composition, machine)
    raise_if_any(
        with_file(problem, job.provenance) for job in composition.jobs for problem in validate(job.config, machine)
    )


def main(arguments: list[str]) -> int:
    """Check everything, then run. Returns the exit code: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach the handlers below instead of Hydra's
    try:
        command, machine = parse_arguments(arguments), this_machine()
        prepare(command)
        if command.purpose is not Purpose.hydra:
            composition = compose_command(command)
            if command.purpose is Purpose.train:
                return _train(command, composition, machine)
            if command.purpose is not Purpose.inform:
                _check(composition, machine)
            if command.purpose is Purpose.options:
                print("\n".join(options_page(composition.jobs[0].config, machine)))
                return 0
        _hydra(command.hydra_argv())
    except (ConfigError, ConfigErrors) as error:
        print_errors(error)
        return BAD_INPUT
    except RunFailed as error:
        print_errors(error)
        return 1
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
