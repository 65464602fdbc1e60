"""The trials of a sweep and how far they are: an optuna study in a journal file, which survives being killed.

A trial is *running* in the journal from the moment it is drawn until its value is told. What a cut sweep left running,
or what failed, comes first when it goes on. Each draw has a seed of its own, from the sweep's seed and the draw's
place, so a sweep that was cut draws what it would have drawn.
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

from ..cells.errors import UsageError
from ..cells.results import write_text
from .config import SweepConfig

SWEEP_FILE = "sweep.json"
JOURNAL_FILE = "study.journal"


@dataclass(frozen=True)
class Trial:
    """`parameters` with the constants; `is_told`: the journal has its value."""

    number: int
    parameters: dict[str, Any]
    is_told: bool = False


class Trials:
    """The trials of one sweep.

    Args:
        folder: of the sweep; made where it is missing.
        outer: parameters that change least often in a grid.
        cap: most trials, in place of the file's run_cap; a grid needs neither.

    Raises:
        UsageError: `folder` holds another sweep, or a damaged file; or nothing says how many trials a random or bayes
            sweep has.
    """

    def __init__(self, config: SweepConfig, folder: Path, seed: int, outer: set[str], cap: int | None = None):
        self.config, self._seed = config, seed
        grid = config.grid(outer) if config.method == "grid" else None
        cap = cap or config.run_cap
        if grid is None and cap is None:
            raise UsageError(f"a {config.method} sweep needs run_cap: in its file, or --trials N")
        self.total = cap if grid is None else min(cap or len(grid), len(grid))
        _check_same_sweep(config, folder, seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                study_name=config.name,
                storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
                direction=config.goal,
                load_if_exists=True,
            )
            self._left = self._taken_up(grid)
            self._drawn = len(self.drawn())
        except Exception as error:  # anything, where the journal does not hold what optuna wrote
            raise UsageError(
                f"{folder / JOURNAL_FILE} cannot be read ({_one_line(error)}): remove it; finished cells are kept"
            ) from error

    def _taken_up(self, grid: list[dict[str, Any]] | None) -> deque[Trial]:
        """What an earlier run has not finished; what is new of the grid is noted."""
        known = self._study.get_trials(deepcopy=False)
        if grid is not None:
            for parameters in grid[sum(trial.state != TrialState.FAIL for trial in known) : self.total]:
                self._study.enqueue_trial(parameters)
        left = deque(trial for trial in self.drawn() if not trial.is_told)
        for trial in known:
            if trial.state == TrialState.RUNNING and not self._is_drawn(trial):  # cut within the draw: draw again
                self._study.tell(trial.number, state=TrialState.FAIL)
                if grid is not None:
                    self._study.enqueue_trial(trial.system_attrs["fixed_params"])
        return left

    @property
    def left(self) -> int:
        """How many trials `next` will still hand out."""
        return len(self._left) + max(self.total - self._drawn, 0)

    def drawn(self) -> list[Trial]:
        """All trials so far, in their order."""
        states = (TrialState.RUNNING, TrialState.COMPLETE)
        return [
            Trial(trial.number, {**self.config.constants, **trial.params}, trial.state == TrialState.COMPLETE)
            for trial in self._study.get_trials(deepcopy=False, states=states)
            if self._is_drawn(trial)
        ]

    def repeat(self, trial: Trial) -> None:
        """Hand out a trial again, next."""
        self._left.appendleft(trial)

    def next(self) -> Trial | None:
        """The next trial to evaluate; None where all were handed out."""
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
        return Trial(drawn.number, {**self.config.constants, **drawn.params})

    def tell(self, trial: Trial, value: float) -> None:
        """A trial is finished. A value that was told before stays."""
        if not trial.is_told:
            self._study.tell(trial.number, value)

    def _is_drawn(self, trial: FrozenTrial) -> bool:
        return trial.params.keys() == self.config.space.keys()


def _check_same_sweep(config: SweepConfig, folder: Path, seed: int) -> None:
    """Note in the folder what sweep it holds. Raises UsageError where it holds another."""
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
        raise UsageError(f"{path} is damaged ({_one_line(error)}): remove it") from None
    if changed := sorted(key for key in wanted if stored.get(key) != json.loads(json.dumps(wanted[key]))):
        raise UsageError(
            f"{folder} holds another sweep of this name ({', '.join(changed)} changed): give --name, or remove it"
        )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
