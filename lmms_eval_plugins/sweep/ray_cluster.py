"""The trials of a sweep on a Ray cluster: a pool of actors that keep their model, one trial each at a time."""

import math
import os
from collections import Counter, deque
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from tqdm import tqdm

from kvcompress.command_line import interrupt_on_signals

from ..cells.errors import EvaluationFailed
from .runner import Sweep
from .study import Trial
from .trial import Evaluator

RETRIES = 3


class Worker:
    """One actor: evaluates trials in the driver's working directory, which its machine has to share."""

    def __init__(self, directory: str, environment: dict[str, str]):
        os.environ.update(environment)
        os.chdir(directory)
        self._evaluator = Evaluator()

    def ready(self) -> None:
        """Answers once the actor has its place on the cluster."""

    def evaluate(self, parameters: dict[str, Any], output: Path) -> None:
        self._evaluator.evaluate(parameters, output)


def run_on_ray(sweep: Sweep, address: str, cpus: int = 1, workers: int | None = None) -> None:
    """Every trial on the cluster at `address` (`local`: a cluster on this machine, for the time of the sweep).

    A trial takes `cpus` cores, and a GPU where the cluster has any and the sweep does not say device=cpu. `workers`
    trials run at once, by default as many as the cluster has room for. A trial whose worker is lost is tried again,
    RETRIES times. A cell that several trials share is evaluated once.

    Raises EvaluationFailed where the cluster cannot be reached or has no room for a trial.
    """
    if not sweep.trials.left:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **settings)
    except (ConnectionError, ValueError) as error:
        hint = "; where the cluster asks for a token, set RAY_AUTH_MODE=token here too" if address != "local" else ""
        raise EvaluationFailed(f"Ray cluster {address!r}: {' '.join(str(error).split())}{hint}") from error
    interrupt_on_signals()  # Ray has put a handler of its own in place
    try:
        has = ray.cluster_resources()
        gpus = 1 if has.get("GPU") and sweep.config.constants.get("device") != "cpu" else 0
        room = min(has.get("CPU", 0) // cpus, has.get("GPU", 0) if gpus else math.inf)
        if not (workers or room):
            raise EvaluationFailed(
                f"the Ray cluster has {has.get('CPU', 0):g} cores, fewer than a trial takes ({cpus})"
            )
        total = sweep.trials.total
        with tqdm(total=total, initial=total - sweep.trials.left, unit="trial", disable=None) as bar:
            sweep.say = bar.write
            pool = Pool(sweep, cpus, gpus, bar)
            for _ in range(min(workers or int(room), sweep.trials.left)):
                pool.start()
            pool.run()
    finally:
        ray.shutdown()


class Pool:
    """The actors, and what each is doing."""

    def __init__(self, sweep: Sweep, cpus: int, gpus: int, bar: tqdm):
        self.sweep, self.bar = sweep, bar
        names = [name for name in ("HF_HUB_OFFLINE", "HF_HOME") if name in os.environ]
        self._arguments = (os.getcwd(), {name: os.environ[name] for name in names})
        self._actor = ray.remote(Worker).options(num_cpus=cpus, num_gpus=gpus)
        # What is awaited -> its actor and the trials of the cell that it evaluates; none for an actor that starts.
        # Trials go only to actors that have their place, so one that cannot be placed holds nothing back.
        self._awaited: dict[ray.ObjectRef, tuple[Any, list[Trial]]] = {}
        self._idle: list[Any] = []
        self._again: deque[list[Trial]] = deque()
        self._lost: Counter[int | None] = Counter()

    def start(self) -> None:
        worker = self._actor.remote(*self._arguments)
        self._awaited[worker.ready.remote()] = (worker, [])

    def run(self) -> None:
        while True:
            while self._idle and (trials := self._next()):
                worker = self._idle.pop()
                done = worker.evaluate.remote(trials[0].parameters, self.sweep.output)
                self._awaited[done] = (worker, trials)
            if self._idle and not any(trials for _, trials in self._awaited.values()):
                return  # an idle actor, and no trial for it
            self._take(ray.wait(list(self._awaited), num_returns=1)[0][0])

    def _next(self) -> list[Trial]:
        """The trials of the next cell, nothing where all are under way. A trial whose cell is under way joins it."""
        from kvcompress import KVCompressError  # a worker imports this file before it has its environment

        if self._again:
            return self._again.popleft()
        while (trial := self.sweep.trials.next()) is not None:
            try:
                cell = self.sweep.cell(trial)
            except KVCompressError as error:
                self._end([trial], error)
                continue
            under_way = [trials for _, trials in self._awaited.values() if trials]
            same = next((trials for trials in under_way if self.sweep.cell(trials[0]) == cell), None)
            if same is None:
                return [trial]
            same.append(trial)
        return []

    def _take(self, reference: ray.ObjectRef) -> None:
        """What an actor answered, or that it is lost."""
        worker, trials = self._awaited.pop(reference)
        try:
            ray.get(reference)
        except RayTaskError as error:
            self._end(trials, error.cause)
        except RayError as error:
            self._replace(worker, trials, error)
            return
        else:
            self._end(trials)
        self._idle.append(worker)

    def _replace(self, worker: Any, trials: list[Trial], error: RayError) -> None:
        """Another actor for a lost one, and its trials once more."""
        ray.kill(worker)  # it may only be out of reach
        number = trials[0].number if trials else None
        self._lost[number] += 1
        if self._lost[number] <= RETRIES:
            if trials:
                self.sweep.say(f"{self.sweep.label(trials[0])}: its worker was lost; trying again")
                self._again.append(trials)
        elif trials:
            self._end(trials, error)
        else:
            raise EvaluationFailed(f"no worker starts on the Ray cluster: {' '.join(str(error).split())[:500]}")
        self.start()

    def _end(self, trials: list[Trial], error: Exception | None = None) -> None:
        for trial in trials:
            try:
                if error is not None:
                    raise error
                self.sweep.finish(trial)
            except Exception as failure:
                self.sweep.fail(trial, failure)
            self.bar.update()
