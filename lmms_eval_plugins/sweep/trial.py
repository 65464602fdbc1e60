"""Run one trial: map its parameters to a cell, evaluate it unless its results are complete, and log it to wandb."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import one_line
from kvcompress.flag_types import shown

from ..cells import results
from ..cells.cell_log import DEFAULT_PROJECT, log_results
from ..cells.errors import EvaluationFailed, UsageError
from ..cells.machine import number_of_processes, rank
from ..cells.names import GROUPS
from ..cells.plan import Plan, check_folders
from ..cells.processes import evaluation
from ..cells.request import arguments_of
from ..cells.run import evaluate_cell, load_model, quiet, score_again
from ..evaluate import parse

if TYPE_CHECKING:
    import wandb

    from ..model.arguments import ModelArguments
    from ..model.lm import KVCompressLM

# Parameters that are flags of the evaluation command; the others are arguments of the model or options of methods.
FLAGS = ("limit", "gen_kwargs", "num_fewshot", "include_path", "data_root", "overlays")


def trial_argv(parameters: dict[str, Any], output_path: Path) -> list[str]:
    """Return the evaluation command's arguments for a trial. Options of other methods are left out, as in a list of
    methods, and so is None. Raises UsageError or KVCompressError for a missing or unknown parameter."""
    from ..model.input_methods import method_options, size_of

    given = {name: value for name, value in parameters.items() if value is not None and str(value) != "None"}
    for name in ("task", "model", "method"):
        if name not in given:
            raise UsageError(f"a trial needs the parameter {name!r}; given: {', '.join(parameters) or 'nothing'}")
    task, model, method = (str(given.pop(name)) for name in ("task", "model", "method"))
    for name, value in (("task", task), ("method", method)):
        if "," in value or value in GROUPS:
            raise UsageError(f"{name} {value!r}: a trial has one {name}; list several under values:")
    size = str(given.pop("ratio", "-"))
    if size_of(method):
        size = "1"  # any will do
        given.pop("budget", None)
    foreign = option_owners().keys() - method_options(method, given.get("scorer")).keys()
    flags = [f"--{name.replace('data_root', 'data-root')}={given.pop(name)}" for name in FLAGS if name in given]
    words = [f"{name}={value}" for name, value in given.items() if name not in foreign]
    return [task, model, method, size, *flags, f"--output_path={output_path}", *words]


def option_owners() -> dict[str, list[str]]:
    """Return option -> the methods that have it."""
    from kvcompress import list_methods

    from ..model.input_methods import INPUT_METHODS, method_options

    owners: dict[str, list[str]] = {}
    for method in (*list_methods(), *INPUT_METHODS):
        for option in method_options(method):
            owners.setdefault(option, []).append(method)
    return owners


def parse_trial(argv: list[str]) -> dict[str, Any]:
    """Parse parameters from `--name=value`, as `wandb agent` writes them. Raises UsageError."""
    for word in argv:
        if not re.fullmatch(r"(--)?\w+=.*", word, re.DOTALL):
            raise UsageError(f"{shown(word)} is not --name=value")
    return arguments_of([word.removeprefix("--") for word in argv])


def plan_of(argv: list[str]) -> Plan:
    """Return the plan of a trial from `trial_argv`. Raises like `Plan.of`, and UsageError if it has several cells."""
    plan = Plan.of(parse(argv))
    if len(plan.cells) > 1:
        names = ", ".join(cell.folder(Path()).name for cell, _ in plan.cells)
        raise UsageError(f"a trial is one cell, not {names}: list several values under values:")
    return plan


def cell_folder(parameters: dict[str, Any], output_path: Path) -> Path:
    """Return the folder for a trial's results, without loading anything. Raises like `trial_argv` and `plan_of`."""
    ((cell, _),) = plan_of(trial_argv(parameters, output_path)).cells
    return cell.folder(output_path.resolve())


class Evaluator:
    """Evaluates trials one by one; the model stays loaded while consecutive trials share it."""

    def __init__(self) -> None:
        self._lm: KVCompressLM | None = None
        self._arguments: ModelArguments | None = None

    def evaluate(self, parameters: dict[str, Any], output_path: Path) -> Path:
        """Evaluate a trial unless its results are complete, and return their folder. With NUM_PROCESSES set, that many
        ranks share the questions. Raises UsageError, KVCompressError or EvaluationFailed."""
        argv = trial_argv(parameters, output_path)
        plan = plan_of(argv)
        plan.check_machine(number_of_processes())
        quiet(plan.request.flags.verbosity)
        (job,) = plan.jobs()
        if job.todo is None:
            return job.folder
        check_folders([job])
        if number_of_processes() > 1:
            _evaluate_on_ranks(argv)
        elif answers := job.kept_answers:
            score_again(job, answers)
        else:
            evaluate_cell(self._model(plan.arguments, plan.needs_template), job)
        return job.folder

    def _model(self, arguments: "ModelArguments", needs_template: bool) -> "KVCompressLM":
        if self._lm is None or arguments != self._arguments:
            if self._lm is not None:
                self._lm.unload()
                self._lm = None
            self._lm, self._arguments = load_model(arguments, needs_template), arguments
        return self._lm


def _evaluate_on_ranks(argv: list[str]) -> None:
    """Run the evaluation command, which starts its ranks itself."""
    with evaluation(argv) as process:
        code = process.wait()
    if code:
        raise EvaluationFailed(f"the evaluation ended with exit code {code}; its error is above")


def read_results(folder: Path) -> dict[str, Any]:
    """Read a cell's results.json. Raises EvaluationFailed if it is missing, DamagedFile if it is damaged."""
    try:
        return results.read_results(folder)
    except FileNotFoundError:
        raise EvaluationFailed(f"no results in {folder}: machines that share a sweep need a shared folder") from None


@contextmanager
def wandb_run(parameters: dict[str, Any], **settings: Any) -> Iterator["wandb.Run"]:
    """Start a wandb run: under `wandb agent` the one it names, otherwise one in WANDB_MODE, by default offline, which
    needs no account.

    An exception in the context marks the run as failed. Raises EvaluationFailed if wandb cannot start one.
    """
    import wandb

    if "WANDB_SWEEP_ID" not in os.environ:
        os.environ.setdefault("WANDB_MODE", "offline")
        settings = {"project": os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT), "config": parameters, **settings}
    try:
        run = wandb.init(job_type="trial", **settings)
    except wandb.Error as error:
        raise EvaluationFailed(f"wandb: {one_line(error)}") from error
    with run:
        yield run


def run_trial(parameters: dict[str, Any], output_path: Path) -> dict[str, float]:
    """Evaluate a trial and log it to wandb on rank 0; `wandb agent` starts this."""
    if rank() != 0:
        Evaluator().evaluate(parameters, output_path)
        return {}
    with wandb_run(parameters) as run:
        return log_results(run, Evaluator().evaluate(parameters, output_path))
