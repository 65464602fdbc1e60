"""Run the trials of a sweep on a Ray cluster, in a pool of actors that keep their model and run one trial at a time."""

import math
import os
from collections import Counter, deque
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from tqdm import tqdm

from kvcompress.command_line import interrupt_on_signals
from kvcompress.errors import one_line

from ..cells.errors import EvaluationFailed
from .runner import Sweep
from .study import Trial
from .trial import Evaluator

RETRIES = 3


class Worker:
    """An actor that evaluates trials in the driver's working directory, which its machine must share."""

    def __init__(self, directory: str, environment: dict[str, str]):
        os.environ.update(environment)
        os.chdir(directory)
        self._evaluator = Evaluator()

    def ready(self) -> None:
        """Return as soon as the actor is placed on the cluster."""

    def evaluate(self, parameters: dict[str, Any], output: Path) -> None:
        self._evaluator.evaluate(parameters, output)


def run_on_ray(sweep: Sweep, address: str, cpus: int = 1, workers: int | None = None) -> None:
    """Run every trial on the cluster at `address` (`local`: a temporary cluster on this machine).

    A trial takes `cpus` cores, and a GPU if the cluster has any and the sweep does not set device=cpu. `workers` trials
    run in parallel, by default as many as fit on the cluster. A trial whose worker is lost is retried up to RETRIES
    times. A cell that several trials share is evaluated once.

    Raises EvaluationFailed if the cluster cannot be reached or has no room for a trial.
    """
    if not sweep.trials.left:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **settings)
    except (ConnectionError, ValueError) as error:
        hint = "; if the cluster requires a token, set RAY_AUTH_MODE=token here too" if address != "local" else ""
        raise EvaluationFailed(f"Ray cluster {address!r}: {one_line(error)}{hint}") from error
    interrupt_on_signals()  # Ray has replaced our handlers
    try:
        has = ray.cluster_resources()
        gpus = 1 if has.get("GPU") and sweep.config.constants.get("device") != "cpu" else 0
        room = min(has.get("CPU", 0) // cpus, has.get("GPU", 0) if gpus else math.inf)
        if not (workers or room):
            raise EvaluationFailed(f"the Ray cluster has {has.get('CPU', 0):g} cores, but a trial needs {cpus}")
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
    """The actors and their current work."""

    def __init__(self, sweep: Sweep, cpus: int, gpus: int, bar: tqdm):
        self.sweep, self.bar = sweep, bar
        names = [name for name in ("HF_HUB_OFFLINE", "HF_HOME") if name in os.environ]
        self._arguments = (os.getcwd(), {name: os.environ[name] for name in names})
        self._actor = ray.remote(Worker).options(num_cpus=cpus, num_gpus=gpus)
        # Awaited reference -> its actor and the trials of the cell that it evaluates; empty while an actor starts.
        # Trials go only to placed actors, so one that cannot be placed holds up nothing.
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
                return  # nothing runs, and no trial is left
            self._take(ray.wait(list(self._awaited), num_returns=1)[0][0])

    def _next(self) -> list[Trial]:
        """Return the trials of the next cell; empty if all are running. A trial whose cell is running joins it."""
        from kvcompress import KVCompressError  # late: a worker imports this file before its environment is set

        if self._again:
            return self._again.popleft()
        while (trial := self.sweep.trials.next()) is not None:
            try:
                cell = self.sweep.cell(trial)
            except KVCompressError as error:
                self._end([trial], error)
                continue
            running = [trials for _, trials in self._awaited.values() if trials]
            same = next((trials for trials in running if self.sweep.cell(trials[0]) == cell), None)
            if same is None:
                return [trial]
            same.append(trial)
        return []

    def _take(self, reference: ray.ObjectRef) -> None:
        """Handle an actor's result, or its loss."""
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
        """Replace a lost actor and retry its trials."""
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
            raise EvaluationFailed(f"no worker starts on the Ray cluster: {one_line(error, 500)}")
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
