"""Sweeps on a Ray cluster: nothing is lost and nothing done twice, also where a worker is killed."""

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import optuna
import psutil
import pytest
import yaml

pytest.importorskip("ray")

from lmms_eval_plugins.cells.errors import EvaluationFailed
from lmms_eval_plugins.sweep import ray_cluster
from lmms_eval_plugins.sweep.study import JOURNAL_FILE, Trial
from tests.support.evaluation import ROOT, start

# -- the pool, with a stand-in for Ray: what an actor does is decided by `outcomes`


class FakeSweep:
    """Five trials; the second and the third are one cell."""

    def __init__(self):
        left = deque(Trial(number, {"cell": cell}) for number, cell in enumerate("abbcd"))
        self.trials = SimpleNamespace(next=lambda: left.popleft() if left else None)
        self.finished, self.failed, self.said = [], [], []
        self.say, self.output = self.said.append, Path("results")

    def cell(self, trial):
        return Path(trial.parameters["cell"])

    def label(self, trial):
        return f"trial {trial.number + 1}"

    def finish(self, trial):
        self.finished.append(trial.number)

    def fail(self, trial, error):
        self.failed.append((trial.number, str(error)))


@pytest.fixture
def pool(monkeypatch):
    """A pool whose actors end their work in the order in which they began, with the next of `outcomes` for the cell."""
    outcomes: dict[str, list[Exception]] = {}
    calls: list[str] = []

    class Reference(SimpleNamespace):
        __hash__ = object.__hash__

    def begin(parameters=None, output=None):
        calls.append(parameters["cell"] if parameters else "start")
        return Reference(call=calls[-1])

    def actor(*arguments):
        method = SimpleNamespace(remote=begin)
        return SimpleNamespace(ready=method, evaluate=method)

    def get(reference):
        if outcomes.get(reference.call):
            raise outcomes[reference.call].pop(0)

    options = SimpleNamespace(options=lambda **resources: SimpleNamespace(remote=actor))
    monkeypatch.setattr(ray_cluster.ray, "remote", lambda worker: options)
    monkeypatch.setattr(ray_cluster.ray, "wait", lambda references, num_returns: (references[:1], references[1:]))
    monkeypatch.setattr(ray_cluster.ray, "get", get)
    monkeypatch.setattr(ray_cluster.ray, "kill", lambda worker: calls.append("kill"))
    made = ray_cluster.Pool(FakeSweep(), 1, 0, SimpleNamespace(update=lambda: None))
    made.start()
    made.start()
    return SimpleNamespace(run=made.run, sweep=made.sweep, outcomes=outcomes, calls=calls)


def test_every_trial_is_finished_once_and_a_shared_cell_evaluated_once(pool):
    pool.run()
    assert sorted(pool.sweep.finished) == [0, 1, 2, 3, 4]
    assert [call for call in pool.calls if call != "start"] == ["a", "b", "c", "d"]
    assert pool.sweep.failed == []


def test_the_trial_of_a_lost_worker_is_tried_again_on_a_new_one(pool):
    pool.outcomes["a"] = [ray_cluster.RayError("gone")]
    pool.run()
    assert sorted(pool.sweep.finished) == [0, 1, 2, 3, 4]
    assert (pool.calls.count("a"), pool.calls.count("start"), pool.calls.count("kill")) == (2, 3, 1)
    assert pool.sweep.said == ["trial 1: its worker was lost; trying again"]


def test_trials_that_share_the_cell_of_a_lost_worker_are_both_finished(pool):
    pool.outcomes["b"] = [ray_cluster.RayError("gone")]
    pool.run()
    assert sorted(pool.sweep.finished) == [0, 1, 2, 3, 4]
    assert pool.calls.count("b") == 2


def test_a_trial_that_loses_every_worker_fails_and_the_others_go_on(pool):
    pool.outcomes["c"] = [ray_cluster.RayError("gone")] * 10
    pool.run()
    assert pool.sweep.failed == [(3, "gone")]
    assert pool.calls.count("c") == 1 + ray_cluster.RETRIES
    assert sorted(pool.sweep.finished) == [0, 1, 2, 4]


def test_an_error_within_a_trial_is_its_failure_and_is_not_tried_again(pool):
    pool.outcomes["d"] = [ray_cluster.RayTaskError("evaluate", "traceback", EvaluationFailed("no data"))]
    pool.run()
    assert pool.sweep.failed == [(4, "no data")]
    assert pool.calls.count("d") == 1


def test_a_cluster_on_which_no_worker_starts_ends_the_sweep(pool):
    pool.outcomes["start"] = [ray_cluster.RayError("no module\nnamed x")] * 10
    with pytest.raises(EvaluationFailed, match="no worker starts on the Ray cluster: no module named x"):
        pool.run()


def test_a_sweep_that_is_finished_needs_no_cluster(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **settings: pytest.fail("a cluster was started"))
    ray_cluster.run_on_ray(SimpleNamespace(trials=SimpleNamespace(left=0)), "local")


def test_a_cluster_that_is_not_there_is_an_error_that_names_it(monkeypatch):
    def init(**settings):
        raise ConnectionError("Failed to connect\nto Ray")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with pytest.raises(
        EvaluationFailed, match="Ray cluster 'host:1': Failed to connect to Ray; if the cluster requires"
    ):
        ray_cluster.run_on_ray(SimpleNamespace(trials=SimpleNamespace(left=1)), "host:1")


def test_a_worker_process_reads_its_environment_before_it_imports_the_hubs_client():
    code = "import sys, lmms_eval_plugins.sweep.ray_cluster; print('huggingface_hub' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.stdout.split() == [b"False"]


# -- a real cluster on this machine


@pytest.mark.slow
def test_a_worker_that_is_killed_within_a_trial_loses_nothing_and_repeats_nothing(tmp_path):
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    parameters = {"task": {"value": "tiny_textvqa"}, "model": {"value": "tiny"}, "ratio": {"values": [0.5, 0.2, 0.1]}}
    parameters["method"] = {"values": ["full", "snapkv", "streamingllm"]}
    file.write_text(yaml.safe_dump({"method": "grid", "parameters": parameters}))
    words = ["run", str(file), "--limit=24", "--output_path", str(out), "--ray=local", "--workers=2"]
    sweep = start("sweep", *words, WANDB_MODE="offline")
    try:
        victim = None
        while victim is None:  # a worker that answers questions: its cell's folder is begun
            assert sweep.poll() is None
            time.sleep(0.1)
            if list(out.glob("tiny_textvqa/tiny/.unfinished-*")):
                workers = psutil.Process(sweep.pid).children(recursive=True)
                victim = next((worker for worker in workers if "Worker.evaluate" in " ".join(worker.cmdline())), None)
        victim.kill()
        said, _ = sweep.communicate(timeout=400)
    finally:
        sweep.kill()
    assert sweep.returncode == 0
    assert said.count("its worker was lost; trying again") == 1
    cells = {path.parent.name for path in out.glob("tiny_textvqa/tiny/[!.]*/results.json")}
    assert cells == {"full-1-limit=24"} | {
        f"{method}-{ratio}-limit=24" for method in ("snapkv", "streamingllm") for ratio in (0.5, 0.2, 0.1)
    }
    folder = out / "sweeps" / "sweep-limit=24"
    backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL_FILE))
    trials = optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend)).get_trials()
    assert [trial.state for trial in trials] == [optuna.trial.TrialState.COMPLETE] * 9
    runs = [path.name.rsplit("-", 1)[1] for path in folder.glob("wandb/offline-run-*")]
    assert len(runs) == len(set(runs)) == 9
