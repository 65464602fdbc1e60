"""Keep the trials of a sweep and their progress in an optuna study, whose journal file survives a killed process.

A trial is *running* in the journal from its draw until its value is recorded. When a sweep resumes, trials that were
running or failed come first. Each draw has its own seed, from the sweep's seed and the number of the draw, so a resumed
sweep draws the same trials as an uninterrupted one.
"""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from kvcompress.errors import one_line
from kvcompress.files import write_text

from ..cells.errors import UsageError
from .config import SweepConfig

SWEEP_FILE = "sweep.json"
JOURNAL_FILE = "study.journal"


@dataclass(frozen=True)
class Trial:
    """A trial; `parameters` include the constants; `is_told`: whether the journal has its value."""

    number: int
    parameters: dict[str, Any]
    is_told: bool = False


class Trials:
    """The trials of one sweep.

    Args:
        folder: the sweep's folder, created if missing. No other process may use it.
        outer: parameters that change least often in a grid.
        cap: the maximum number of trials, in place of the file's run_cap; a grid needs neither.

    Raises:
        UsageError: `folder` holds another sweep or a damaged file, or a random or bayes sweep has no number of trials.
    """

    def __init__(self, config: SweepConfig, folder: Path, seed: int, outer: set[str], cap: int | None = None):
        self.config, self._seed = config, seed
        grid = config.grid(outer) if config.method == "grid" else None
        cap = cap or config.run_cap
        if grid is None and cap is None:
            raise UsageError(f"a {config.method} sweep needs run_cap in its file, or --trials N")
        self.total = cap if grid is None else min(cap or len(grid), len(grid))
        _check_same_sweep(config, folder, seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            _mend(folder / JOURNAL_FILE)
            self._study = optuna.create_study(
                study_name=config.name,
                storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
                direction=config.goal,
                load_if_exists=True,
            )
            self._left = self._resume(grid)
            self._drawn = len(self.drawn())
        except Exception as error:  # optuna raises anything for a damaged journal
            what = one_line(f"{type(error).__name__}: {error}")
            raise UsageError(
                f"{folder / JOURNAL_FILE} cannot be read ({what}): remove it; finished cells are kept"
            ) from error

    def _resume(self, grid: list[dict[str, Any]] | None) -> deque[Trial]:
        """Return the trials that an earlier run left unfinished, and enqueue the new ones of a grid."""
        known = self._study.get_trials(deepcopy=False)
        if grid is not None:
            for parameters in grid[sum(trial.state != TrialState.FAIL for trial in known) : self.total]:
                self._study.enqueue_trial(parameters)
        left = deque(trial for trial in self.drawn() if not trial.is_told)
        for trial in known:
            if trial.state == TrialState.RUNNING and not self._is_drawn(trial):  # interrupted while drawing: draw again
                self._study.tell(trial.number, state=TrialState.FAIL)
                if grid is not None:
                    self._study.enqueue_trial(trial.system_attrs["fixed_params"])
        return left

    @property
    def left(self) -> int:
        """The number of trials that `next` will still hand out."""
        return len(self._left) + max(self.total - self._drawn, 0)

    def drawn(self) -> list[Trial]:
        """Return all trials so far, in order."""
        states = (TrialState.RUNNING, TrialState.COMPLETE)
        return [
            Trial(trial.number, self._parameters(trial.params), trial.state == TrialState.COMPLETE)
            for trial in self._study.get_trials(deepcopy=False, states=states)
            if self._is_drawn(trial)
        ]

    def repeat(self, trial: Trial) -> None:
        """Hand out a trial again, before all others."""
        self._left.appendleft(trial)

    def next(self) -> Trial | None:
        """Return the next trial to evaluate; None if all have been handed out."""
        if self._left:
            return self._left.popleft()
        if self._drawn >= self.total:
            return None
        seed = (self._seed * 1_000_003 + self._drawn) % 2**32
        samplers = optuna.samplers
        sampler = samplers.TPESampler if self.config.method == "bayes" else samplers.RandomSampler
        self._study.sampler = sampler(seed=seed)
        drawn = self._study.ask(self.config.space)
        self._drawn += 1
        return Trial(drawn.number, self._parameters(drawn.params))

    def tell(self, trial: Trial, value: float) -> None:
        """Record the value of a finished trial; an earlier value stays."""
        if not trial.is_told:
            self._study.tell(trial.number, value)

    def _parameters(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Return all parameters of a trial. A multiple of a step is the nearest short number: 0.3, not 3 * 0.1."""
        steps = {name for name, of in self.config.space.items() if getattr(of, "step", None)}
        short = {name: float(f"{drawn[name]:.12g}") for name in steps & drawn.keys() if isinstance(drawn[name], float)}
        return {**self.config.constants, **drawn, **short}

    def _is_drawn(self, trial: FrozenTrial) -> bool:
        return trial.params.keys() == self.config.space.keys()


def _mend(journal: Path) -> None:
    """Remove what a process leaves that is killed, or meets a full disk, while it writes: an unfinished line, to which
    optuna would append, and optuna's lock, for which it would wait: for half a minute, in a moved folder for ever."""
    journal.with_name(journal.name + ".lock").unlink(missing_ok=True)
    if journal.exists():
        with open(journal, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _check_same_sweep(config: SweepConfig, folder: Path, seed: int) -> None:
    """Record in the folder which sweep it holds. Raises UsageError if it holds another."""
    wanted = {
        "method": config.method,
        "metric": config.metric,
        "goal": config.goal,
        "constants": config.constants,
        "space": {name: json.loads(distribution_to_json(given)) for name, given in config.space.items()},
        "seed": seed,
    }
    path = folder / SWEEP_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(wanted, indent=2) + "\n")
    try:
        stored = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        what = one_line(f"{type(error).__name__}: {error}")
        raise UsageError(f"{path} is damaged ({what}): remove it") from None
    if changed := sorted(key for key in wanted if stored.get(key) != json.loads(json.dumps(wanted[key]))):
        raise UsageError(
            f"{folder} holds another sweep of this name ({', '.join(changed)} changed): give --name, or remove it"
        )
