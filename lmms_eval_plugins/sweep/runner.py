"""Run a sweep in this process, or hand out its trials to a Ray cluster."""

import fcntl
import hashlib
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kvcompress.errors import KVCompressError, nearest, one_line
from kvcompress.flag_types import folder as existing_folder

from ..cells.cell_log import cell_values, log_results
from ..cells.data import find_tasks
from ..cells.errors import EvaluationFailed, UsageError
from ..cells.names import is_lm_eval
from ..cells.results import RESULTS_FILE, DamagedFile
from .config import SweepConfig
from .study import Trial, Trials
from .trial import (
    FLAGS,
    Evaluator,
    cell_folder,
    option_owners,
    read_results,
    wandb_run,
)

MOST_FIRST_FAILURES = 3


class Sweep:
    """Hands out the trials of a sweep and collects their results.

    Args:
        output: root of the results; the sweep's own folder is `sweeps/<name>` in it.
        cap: the maximum number of trials, in place of the file's.

    Raises:
        UsageError: the folder holds another sweep.
    """

    def __init__(self, config: SweepConfig, output: Path, seed: int = 0, cap: int | None = None):
        self.config, self.output = config, output.resolve()
        self.folder = self.output / "sweeps" / config.name
        self.failures: list[str] = []
        self._failed: set[Path | int] = set()  # cells; `full` is the same one at every ratio
        self.say: Callable[[str], None] = partial(print, flush=True)
        self._finished = 0
        self.trials = Trials(config, self.folder, seed, model_parameters(), cap)
        for trial in self.trials.drawn():
            if trial.is_told and not self._is_readable(trial):
                self.trials.repeat(trial)

    def _is_readable(self, trial: Trial) -> bool:
        try:
            read_results(self.cell(trial))
        except (EvaluationFailed, DamagedFile) as error:
            self.say(f"{self.label(trial)}: evaluating again: {error}")
            return False
        return True

    def cell(self, trial: Trial) -> Path:
        """Return the folder of the trial's results."""
        return cell_folder(trial.parameters, self.output)

    def label(self, trial: Trial) -> str:
        varied = [f"{name}={trial.parameters[name]}" for name in self.config.space]
        return f"trial {trial.number + 1} of {self.trials.total} ({' '.join(varied)})"

    def finish(self, trial: Trial) -> None:
        """Log a trial whose cell is complete and record its value. Raises EvaluationFailed if it has none."""
        folder, metric = self.cell(trial), self.config.metric
        values = cell_values(read_results(folder))
        if metric not in values:
            why = ": a prefix cache spared prefills; give prefix_cache_gb=0" if metric == "throughput" else ""
            raise EvaluationFailed(f"{folder} has no {metric}{why}")
        # A fixed id per trial: if an interrupted sweep logs it twice, it is still one run online.
        run_id = hashlib.sha256(f"{self.folder} {trial.number}".encode()).hexdigest()[:12]
        os.environ.setdefault("WANDB_SILENT", "true")
        with wandb_run(trial.parameters, id=run_id, group=self.config.name, dir=self.folder) as run:
            log_results(run, folder)
        self.trials.tell(trial, values[metric])
        self._finished += 1
        self.say(f"{self.label(trial)}: {metric} {values[metric]:.4g}")

    def has_failed(self, cell: Path) -> bool:
        """Whether a cell failed and left no results."""
        return cell in self._failed and not (cell / RESULTS_FILE).exists()

    def fail(self, trial: Trial, error: Exception) -> None:
        """Record a failure and go on with the other trials. Raises EvaluationFailed if the first cells all fail."""
        text = f"{self.label(trial)} failed: {type(error).__name__}: {one_line(error, 500)}"
        self.failures.append(text)
        self.say(text)
        try:
            self._failed.add(self.cell(trial))
        except KVCompressError:  # an impossible trial
            self._failed.add(trial.number)
        if len(self._failed) >= MOST_FIRST_FAILURES and not self._finished:
            raise EvaluationFailed(f"the first {len(self.failures)} trials failed; {text}")


def model_parameters() -> set[str]:
    """Return the parameters that need the model loaded anew; a grid changes these least often."""
    from ..model.arguments import ModelArguments

    return {"model", *ModelArguments.model_fields}


def check_trials(config: SweepConfig, output: Path) -> None:
    """Raise UsageError or KVCompressError for a parameter that no part of the sweep has, or an impossible trial. All
    trials of a grid are checked, otherwise one per method."""
    from ..model.input_methods import method_options

    owners = option_owners()
    own = {
        option
        for method in config.values("method")
        for scorer in config.values("scorer")
        for option in method_options(method, scorer)
    }
    valid = sorted({"task", "method", "ratio", "budget", *own, *model_parameters(), *FLAGS} - {"legacy", "pretrained"})
    for name in {**config.constants, **config.space}:
        if name in owners and name not in own:
            raise UsageError(
                f"parameter {name!r} is an option of {', '.join(owners[name])}, but of no method in this sweep"
            )
        if name not in valid:
            raise UsageError(f"unknown parameter {name!r}{nearest(name, valid)}; valid: {', '.join(valid)}")
    for parameters in config.grid(set()) if config.method == "grid" else config.corners():
        cell_folder({**config.constants, **parameters}, output)
    include_path = config.constants.get("include_path")
    folder = include_path and existing_folder(str(include_path))
    if names := [name for name in map(str, config.values("task")) if not is_lm_eval(name, folder)]:
        find_tasks(names, folder)


def run_here(sweep: Sweep) -> None:
    """Run every trial in this process, one by one."""
    evaluator = Evaluator()
    while (trial := sweep.trials.next()) is not None:
        try:
            evaluator.evaluate(trial.parameters, sweep.output)
            sweep.finish(trial)
        except (KVCompressError, EvaluationFailed) as error:
            sweep.fail(trial, error)
        except Exception as error:  # one trial that needs too much memory must not end a night's sweep
            traceback.print_exc()
            sweep.fail(trial, error)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the sweep's folder until this process ends. Raises EvaluationFailed if another process holds the lock. On a
    file system without locks this has no effect."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:  # NFS locks files that are open for writing, and no folders
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvaluationFailed(f"{folder}: another process is running this sweep") from None
        except OSError:
            pass  # a file system without locks
        yield
