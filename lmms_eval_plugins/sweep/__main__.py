"""`kvcompress sweep`: run all trials of a wandb sweep file, here or on Ray, and tabulate them. See docs/sweeps.md.

`python -m lmms_eval_plugins.sweep run` does the same; `... trial` is what `wandb agent` runs.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompress.command_line import Parser, check_environment, returns_exit_code
from kvcompress.errors import KVCompressError
from kvcompress.flag_types import count_or_fraction, folder, label, path, whole

from ..cells.errors import EvaluationFailed, UsageError
from ..cells.machine import VARIABLES, number_of_processes, say, set_offline
from ..cells.names import check_tasks
from ..cells.run import quiet
from ..evaluate import parse
from .trial import cell_folder, parse_trial, run_trial

USAGE = """CONFIG [flags] [parameter=value ...]
       python -m lmms_eval_plugins.sweep trial --task=TASK --model=MODEL --method=METHOD --ratio=RATIO ..."""


def parser() -> argparse.ArgumentParser:
    this = Parser("sweep", usage=f"%(prog)s {USAGE}")
    add = this.add_argument
    add("config", type=path, metavar="CONFIG", help="a wandb sweep file, or a name of configs/sweeps: demo")
    add("overrides", nargs="*", metavar="parameter=value", help="constants that replace the file's parameters")
    add("--limit", type=count_or_fraction, help="questions per task: the same as limit=N")
    add("--trials", type=whole(1), metavar="N", help="maximum number of trials (default: the file's run_cap)")
    add("--seed", type=whole(), default=0, help="seed of random and bayes (0)")
    add("--name", type=label, help="name of the sweep's folder (default: the file's name and the overrides)")
    add("--output_path", type=path, default=Path("results"), metavar="DIR", help="root of the results (results)")
    add("--ray", type=label, metavar="ADDRESS", help="run on the Ray cluster at ADDRESS, or on a `local` one")
    add("--cpus-per-trial", type=whole(1), metavar="N", help="cores per trial on Ray (1)")
    add("--workers", type=whole(1), metavar="N", help="parallel trials on Ray (default: as many as fit)")
    return this


def run(argv: list[str]) -> None:
    """Run all trials of a sweep file and write their table. Raises EvaluationFailed if a trial has no results."""
    flags = parser().parse_intermixed_args(argv)
    overrides = parse_trial(flags.overrides)
    if flags.limit is not None:
        overrides["limit"] = flags.limit
    if flags.ray is None and (flags.workers or flags.cpus_per_trial):
        raise UsageError("--workers and --cpus-per-trial need --ray")
    if flags.ray is not None and number_of_processes() > 1:
        raise UsageError(f"NUM_PROCESSES={number_of_processes()} with --ray: a trial on Ray is one process")
    try:
        from .config import read_config

        if flags.ray is not None:
            from .ray_cluster import run_on_ray
    except ImportError as error:
        raise EvaluationFailed(f"{error.name} is not installed: pip install 'kvcompress[sweep]'") from error
    config = read_config(flags.config, overrides, flags.name)
    try:
        _check_task(config.values("model"), config.values("task"), _include_path(config.constants))
        from kvcompress.files import check_output

        from .runner import Sweep, check_trials, locked, run_here
        from .table import write_table

        quiet("WARNING")
        check_trials(config, flags.output_path)
    except KVCompressError as error:
        raise UsageError(f"{flags.config}: {error}") from None
    check_output(flags.output_path / "sweeps" / config.name)
    with locked(flags.output_path / "sweeps" / config.name):
        sweep = Sweep(config, flags.output_path, flags.seed, flags.trials)
        say(f"{sweep.trials.left} of {sweep.trials.total} trials to do; progress is saved in {sweep.folder}")
        if flags.ray is None:
            run_here(sweep)
        else:
            run_on_ray(sweep, flags.ray, flags.cpus_per_trial or 1, flags.workers)
        write_table(sweep)
    if sweep.failures:
        failed = f"{len(sweep.failures)} of {sweep.trials.total} trials failed; the same command tries them again"
        raise EvaluationFailed(f"{failed}; the last: {sweep.failures[-1]}")


def trial(argv: list[str]) -> None:
    """Run one trial and log it to wandb."""
    parameters = parse_trial(argv)
    output_path = _checked(path, "output_path", parameters.pop("output_path", "results"))
    _check_task([parameters.get("model")], [parameters.get("task")], _include_path(parameters))
    if "WANDB_SWEEP_ID" not in os.environ:  # in a wandb sweep, a wrong trial should show as a failed run
        cell_folder(parameters, output_path)
    values = run_trial(parameters, output_path)
    say(" ".join(f"{name}={value:.4g}" for name, value in values.items()))


def _check_task(models: list[Any], tasks: list[Any], include_path: Path | None) -> None:
    """Raise UsageError for an unknown task, and stay off the hub if nothing is there; a trial itself names a parameter
    that is missing, None here."""
    models, tasks = ([str(value) for value in values if value is not None] for values in (models, tasks))
    if models and tasks:
        check_tasks(tasks, include_path)
        set_offline(*(parse([",".join(tasks), model, "full", "1"]) for model in models))


def _include_path(parameters: dict[str, Any]) -> Path | None:
    given = parameters.get("include_path")
    return None if given is None else _checked(folder, "include_path", given)


def _checked(kind: Callable[[str], Path], parameter: str, value: Any) -> Path:
    """Convert a parameter's value as a flag of this type would. Raises UsageError."""
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{parameter}={error}") from None


@returns_exit_code("trials")
def main(argv: list[str]) -> None:
    """Dispatch to `run` or `trial`."""
    commands = {"run": run, "trial": trial}
    if not argv or argv[0] not in commands:
        raise UsageError(f"{argv[0] if argv else 'nothing'!r} is neither run nor trial; both are in docs/sweeps.md")
    check_environment(VARIABLES)
    commands[argv[0]](argv[1:])


def run_main(argv: list[str]) -> int:
    """`kvcompress sweep`: the same as `run`."""
    return main(["run", *argv])


if __name__ == "__main__":
    sys.exit(main())
