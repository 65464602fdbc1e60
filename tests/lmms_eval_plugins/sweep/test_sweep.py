"""Sweeps: trials, what they log, and that an interrupted sweep continues as if it had not been."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import optuna
import pytest
import torch
import wandb
import yaml

from kvcompress.errors import KVCompressError
from lmms_eval_plugins.cells import cell_log
from lmms_eval_plugins.cells.errors import EvaluationFailed
from lmms_eval_plugins.cells.results import dumps, new_cell, write_cell
from lmms_eval_plugins.sweep import __main__ as command
from lmms_eval_plugins.sweep import runner, trial
from lmms_eval_plugins.sweep.config import read_config
from lmms_eval_plugins.sweep.runner import Sweep, locked, run_here
from lmms_eval_plugins.sweep.study import JOURNAL_FILE, Trials
from lmms_eval_plugins.sweep.table import write_table
from tests.support.evaluation import start
from tests.support.wandb_files import read_run

TRIAL = {"task": "tiny_textvqa", "model": "tiny", "method": "snapkv", "ratio": 0.2, "limit": 2, "window_size": 8}
SPACE = {
    "task": {"value": "tiny_textvqa"},
    "model": {"value": "tiny"},
    "method": {"values": ["full", "snapkv"]},
    "ratio": {"values": [0.5, 0.2]},
}
SEARCH = {
    **SPACE,
    "method": {"value": "snapkv"},
    "ratio": {"min": 0.1, "max": 1.0},
    "window_size": {"min": 1, "max": 32},
}


def write(path: Path, method: str = "grid", parameters: dict = SPACE, **others) -> Path:
    metric = {"name": "accuracy", "goal": "maximize"}
    path.write_text(yaml.safe_dump({"method": method, "metric": metric, "parameters": parameters, **others}))
    return path


@pytest.fixture
def config(tmp_path):
    return lambda *args, **others: read_config(write(tmp_path / "sweep.yaml", *args, **others), {})


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """wandb writes under tmp_path; it remembers such settings for the whole process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield tmp_path / "wandb"
    wandb.teardown()


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_a_sweep_whose_notes_are_damaged_says_which(tmp_path, config):
    for name, damage in (("sweep.json", "[]x"), (JOURNAL_FILE, "{}\n\x00\n")):
        folder = tmp_path / name.partition(".")[2]
        Trials(config(), folder, 0, set())
        (folder / name).write_text(damage)
        with pytest.raises(KVCompressError, match=f"{name} .*: remove it") as error:
            Trials(config(), folder, 0, set())
        assert "\n" not in str(error.value)


# -- one trial


def test_a_trial_offline_logs_all_that_lmms_eval_leaves_out(tmp_path, offline):
    values = trial.run_trial(TRIAL, tmp_path / "results")
    cell = results_of(tmp_path / "results/tiny_textvqa/tiny/snapkv-0.2-limit=2-window_size=8")
    run = read_run(offline)
    (logged,) = run["history"]
    assert {*cell_log.METRICS, "samples"} <= logged.keys()
    assert {name: logged[name] for name in values} == pytest.approx(values)
    assert logged["accuracy"] == cell["results"]["tiny_textvqa"]["exact_match,none"]
    assert logged["accuracy_stderr"] == cell["results"]["tiny_textvqa"]["exact_match_stderr,none"]
    assert logged["throughput"] == cell["efficiency"]["tokens_per_s"]
    for name, quantity in (("ttft_s", "ttft_s"), ("tpot_s", "tpot_s"), ("kv_bytes", "kv_held_bytes")):
        assert logged[name] == pytest.approx(cell["efficiency"][quantity]["median"])
    assert logged["realised_ratio"] == pytest.approx(0.2, abs=0.01)
    assert run["config"]["window_size"] == 8
    assert run["config"]["protocol"] == cell["protocol"]
    assert run["exit"] == 0
    (artifact,) = run["artifacts"]
    assert artifact["type"] == "results"
    place = "tiny_textvqa/tiny/snapkv-0.2-limit=2-window_size=8"
    names = ("results.json", "samples.jsonl")
    assert artifact["files"] == {f"{place}/{name}": str(tmp_path / "results" / place / name) for name in names}


def test_a_trial_that_is_complete_on_disk_is_only_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    first = trial.run_trial(TRIAL, tmp_path)
    monkeypatch.setattr(trial, "load_model", lambda *given: pytest.fail("a model was loaded"))
    assert trial.run_trial(TRIAL, tmp_path) == first


def test_trials_that_share_a_model_load_it_once(tmp_path, monkeypatch):
    loaded, load, evaluated = [], trial.load_model, []
    monkeypatch.setattr(trial, "load_model", lambda *given: loaded.append(given[0]) or load(*given))
    monkeypatch.setattr(trial, "evaluate_cell", lambda lm, job: evaluated.append((lm.model.dtype, job.cell.method)))
    evaluator = trial.Evaluator()
    for changes in ({}, {"ratio": 0.5}, {"method": "full"}, {"dtype": "bfloat16"}):
        evaluator.evaluate({**TRIAL, **changes}, tmp_path)
    assert [arguments.dtype for arguments in loaded] == ["auto", "bfloat16"]
    float32 = [(torch.float32, method) for method in ("snapkv", "snapkv", "full")]
    assert evaluated == [*float32, (torch.bfloat16, "snapkv")]


def test_a_trial_that_fails_marks_its_run_as_failed(tmp_path, offline, capsys):
    arguments = [f"--{name}={value}" for name, value in {**TRIAL, "model": "org/absent"}.items()]
    assert command.main(["trial", *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: model 'org/absent' is not on this machine")
    assert read_run(offline)["exit"] == 1


def test_with_several_processes_the_evaluation_command_starts_them_and_one_run_is_logged(tmp_path, monkeypatch):
    commands = []

    @contextlib.contextmanager
    def fake(arguments):
        commands.append(arguments)
        yield SimpleNamespace(wait=lambda: 3)

    monkeypatch.setenv("NUM_PROCESSES", "2")
    monkeypatch.setattr(trial, "evaluation", fake)
    with pytest.raises(EvaluationFailed, match="ended with exit code 3"):
        trial.Evaluator().evaluate(TRIAL, tmp_path)
    (arguments,) = commands
    assert arguments[:4] == ["tiny_textvqa", "tiny", "snapkv", "0.2"]


def test_under_wandbs_agent_a_run_has_the_project_and_config_of_the_agent(monkeypatch):
    begun = []
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    monkeypatch.setattr(wandb, "init", lambda **settings: begun.append(settings) or contextlib.nullcontext())
    with trial.wandb_run(TRIAL, group="mine"):
        pass
    assert begun == [{"job_type": "trial", "group": "mine"}]


# -- the trials of a sweep, without a model


def value_of(parameters: dict) -> float:
    return parameters["ratio"] + parameters["window_size"] / 100


def play(config, folder: Path, cut_at: tuple[int, ...] = (), within_draw: int | None = None) -> list[tuple]:
    """All trials of a search with `value_of` as their value; cut before the values of some are told."""
    trials, done = Trials(config, folder, 0, set()), 0
    while (drawn := trials.next()) is not None:
        if done in cut_at:
            cut_at = tuple(at for at in cut_at if at != done)
            trials = Trials(config, folder, 0, set())
        else:
            trials.tell(drawn, value_of(drawn.parameters))
            done += 1
            if done == within_draw:
                trials._study.ask()  # noted, and killed before it has parameters
                trials = Trials(config, folder, 0, set())
    return [tuple(sorted(found.parameters.items())) for found in trials.drawn()]


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_search_that_was_cut_draws_what_it_would_have_drawn(config, tmp_path, method):
    search = config(method, SEARCH, run_cap=13)
    whole = play(search, tmp_path / "whole")
    assert len(set(whole)) == 13
    assert play(search, tmp_path / "cut", cut_at=(0, 5, 12)) == whole
    assert play(search, tmp_path / "within", within_draw=11) == whole


@pytest.mark.parametrize("method", ["grid", "bayes"])
def test_a_journal_whose_last_line_was_cut_or_whose_lock_was_left_goes_on(config, tmp_path, method):
    parameters = {**SEARCH, "ratio": {"values": [0.5, 0.2]}, "window_size": {"values": [4, 8]}}
    search = config(method, parameters if method == "grid" else SEARCH, run_cap=4)
    whole = play(search, tmp_path / "whole")
    written = (tmp_path / "whole" / JOURNAL_FILE).read_bytes()
    for cut in range(1, len(written), 97):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / JOURNAL_FILE).write_bytes(written[:cut])
        (folder / f"{JOURNAL_FILE}.lock").symlink_to(tmp_path / "moved" / JOURNAL_FILE)
        for _ in range(2):
            assert sorted(play(search, folder)) == sorted(whole)


def test_a_bayes_search_finds_better_trials_than_random(config, tmp_path):
    def late(method):
        found = play(config(method, SEARCH, run_cap=20), tmp_path / method)
        return sum(value_of(dict(parameters)) for parameters in found[-8:])

    assert late("bayes") > late("random")


def test_another_seed_draws_other_trials(config, tmp_path):
    search = config("random", SEARCH, run_cap=3)
    first, second = (Trials(search, tmp_path / str(seed), seed, set()).next() for seed in (0, 1))
    assert first.parameters != second.parameters


def test_a_grid_goes_on_with_what_was_left_running(config, tmp_path):
    grid = config()
    trials = Trials(grid, tmp_path, 0, set())
    first, second = trials.next(), trials.next()
    trials.tell(second, 1.0)
    assert trials.left == 2
    again = Trials(grid, tmp_path, 0, set())
    assert again.left == 3
    numbers = [again.next().number for _ in range(3)]
    assert numbers == [first.number, 2, 3]
    assert again.next() is None


def test_a_grid_that_was_cut_within_a_draw_loses_no_combination(config, tmp_path):
    grid = config("grid", {**SPACE, "ratio": {"values": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]}})
    trials = Trials(grid, tmp_path, 0, set())
    trials.tell(trials.next(), 1.0)
    for _ in range(3):
        trials._study.ask()  # noted, and killed before it has parameters
    again = Trials(grid, tmp_path, 0, set())
    seen = [again.drawn()[0].parameters]
    while (drawn := again.next()) is not None:
        again.tell(drawn, 1.0)
        seen.append(drawn.parameters)
    assert len(seen) == 12
    assert len({(found["method"], found["ratio"]) for found in seen}) == 12
    states = [found.state.name for found in again._study.get_trials()]
    assert (states.count("COMPLETE"), states.count("FAIL"), len(states)) == (12, 3, 15)
    assert Trials(grid, tmp_path, 0, set()).left == 0


def test_a_search_without_run_cap_is_an_error_and_a_cap_can_grow(config, tmp_path):
    with pytest.raises(KVCompressError, match="a random sweep needs run_cap in its file, or --trials N"):
        Trials(config("random", SEARCH), tmp_path, 0, set())
    assert Trials(config("random", SEARCH), tmp_path, 0, set(), cap=2).left == 2
    assert Trials(config("random", SEARCH), tmp_path, 0, set(), cap=5).left == 5


def test_another_sweep_of_the_same_name_is_an_error(config, tmp_path):
    Trials(config(), tmp_path, 0, set())
    with pytest.raises(
        KVCompressError, match=r"holds another sweep of this name \(constants, space changed\): give --name"
    ):
        Trials(config("grid", {**SPACE, "ratio": {"value": 0.2}}), tmp_path, 0, set())
    with pytest.raises(KVCompressError, match=r"\(seed changed\)"):
        Trials(config(), tmp_path, 1, set())


def test_a_sweep_runs_in_one_process_only(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(EvaluationFailed, match="another process is running this sweep"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


# -- a sweep with a stand-in for the model


class FakeEvaluator:
    """Writes a cell whose score is its ratio. `broken` ratios fail."""

    broken: tuple[float, ...] = ()
    evaluated: ClassVar[list[str]] = []

    def evaluate(self, parameters: dict, output: Path) -> Path:
        if parameters["ratio"] in self.broken:
            raise RuntimeError("out of\nmemory")
        folder = trial.cell_folder(parameters, output)
        if folder.exists():
            return folder
        self.evaluated.append(folder.name)
        method, ratio = parameters["method"], 1.0 if parameters["method"] == "full" else parameters["ratio"]
        protocol = {"task": parameters["task"], "model": "tiny", "method": method, "ratio": ratio, "budget": None}
        protocol |= {"settings": {}, "changed_options": {}, "scope": None, "ratio_of": None, "first_token": None}
        scores = {"exact_match,none": ratio, "exact_match_stderr,none": 0.01}
        efficiency = {name: {"median": ratio} for name in ("ttft_s", "tpot_s", "kv_held_bytes", "peak_memory_bytes")}
        efficiency["realised_ratio"] = {"mean": ratio}
        results = {"protocol": protocol, "results": {parameters["task"]: scores}, "efficiency": efficiency}
        with new_cell(folder) as draft:
            write_cell(draft, json.loads(dumps({**results, "environment": {}})), [])
        return folder


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeEvaluator, "broken", ())
    monkeypatch.setattr(FakeEvaluator, "evaluated", [])
    monkeypatch.setattr(runner, "Evaluator", FakeEvaluator)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(command, "quiet", lambda verbosity: None)
    return FakeEvaluator


def report_of(output: Path, name: str = "sweep") -> list[list[str]]:
    """The rows of a sweep's table."""
    lines = (output / "sweeps" / name / "report.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if row[0] not in ("trial", "---")]


def test_a_grid_ends_with_a_table_in_its_order_one_row_per_cell(fake, tmp_path, capsys):
    assert command.main(["run", str(write(tmp_path / "sweep.yaml")), f"--output_path={tmp_path / 'out'}"]) == 0
    assert fake.evaluated == ["full-1", "snapkv-0.5", "snapkv-0.2"]
    assert [row[:4] for row in report_of(tmp_path / "out")] == [
        ["1", "full", "1.000", "100.0 ± 1.0"],
        ["3", "snapkv", "0.500", "50.0 ± 1.0"],
        ["4", "snapkv", "0.200", "20.0 ± 1.0"],
    ]
    assert "trial 4 of 4 (method=snapkv ratio=0.2): accuracy 0.2" in capsys.readouterr().out


@pytest.mark.parametrize(("goal", "metric", "best"), [("maximize", "accuracy", max), ("minimize", "ttft_s", min)])
def test_a_search_ends_with_the_best_trial_first(fake, tmp_path, goal, metric, best):
    file = write(tmp_path / "sweep.yaml", "random", SEARCH, run_cap=6)
    file.write_text(file.read_text().replace("accuracy", metric).replace("maximize", goal))
    assert command.main(["run", str(file), f"--output_path={tmp_path / 'out'}"]) == 0
    ratios = [float(row[2]) for row in report_of(tmp_path / "out")]
    assert len(ratios) == 6
    assert ratios == sorted(ratios, reverse=best is max)


def test_a_failed_trial_is_named_does_not_end_the_sweep_and_is_tried_again(fake, tmp_path, capsys):
    arguments = ["run", str(write(tmp_path / "sweep.yaml")), f"--output_path={tmp_path / 'out'}"]
    fake.broken = (0.5,)
    assert command.main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: 2 of 4 trials failed; the same command tries them again; the last: trial 3 of 4 (")
    assert error.endswith("RuntimeError: out of memory")
    assert [row[0] for row in report_of(tmp_path / "out")] == ["2", "4"]
    fake.broken = ()
    assert command.main(arguments) == 0
    assert fake.evaluated == ["full-1", "snapkv-0.2", "snapkv-0.5"]
    assert [row[0] for row in report_of(tmp_path / "out")] == ["1", "3", "4"]
    fake.broken = (0.5,)  # and its cell is gone
    (lost,) = (tmp_path / "out").rglob("snapkv-0.5")
    shutil.rmtree(lost)
    capsys.readouterr()
    assert command.main(arguments) == 1
    assert "trials failed; the same command tries them again" in capsys.readouterr().err.splitlines()[-1]
    assert [row[0] for row in report_of(tmp_path / "out")] == ["1", "4"]


def test_multiples_of_a_step_are_short_numbers(tmp_path, config):
    steps = {"task": {"value": "t"}, "ratio": {"distribution": "q_uniform", "min": 0.1, "max": 0.9, "q": 0.1}}
    trials = Trials(config("random", steps, name="s", run_cap=60), tmp_path, 0, set())
    drawn = [trials.next().parameters["ratio"] for _ in range(60)]
    assert set(drawn) == {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}
    assert [trial.parameters["ratio"] for trial in trials.drawn()] == drawn


def test_a_sweep_runs_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*given):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(tmp_path / "sweep"):
        pass


def test_a_sweep_whose_first_trials_all_fail_ends(fake, tmp_path, capsys):
    fake.broken = (0.5, 0.2)
    assert command.main(["run", str(write(tmp_path / "sweep.yaml")), f"--output_path={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "error: the first 4 trials failed; trial 4 of 4" in error, "the full cache's two are one cell"


@pytest.mark.parametrize("are_gone", [True, False])
def test_a_finished_trial_whose_results_are_gone_or_damaged_is_evaluated_again(
    fake, config, tmp_path, capsys, are_gone
):
    run_here(Sweep(config(), tmp_path))
    cell = tmp_path / "tiny_textvqa/tiny/snapkv-0.2"
    if are_gone:
        shutil.rmtree(cell)
    else:
        (cell / "results.json").write_text("null")
    again = Sweep(config(), tmp_path)
    assert again.trials.left == 1
    assert ("evaluating again: results.json is damaged" in capsys.readouterr().out) != are_gone
    shutil.rmtree(cell, ignore_errors=True)  # the stand-in evaluates what is not there
    run_here(again)
    write_table(again)
    assert fake.evaluated == ["full-1", "snapkv-0.5", "snapkv-0.2", "snapkv-0.2"]
    assert len(report_of(tmp_path)) == 3


def test_each_trial_of_a_local_sweep_is_one_offline_run(fake, tmp_path, offline, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_SILENT", "true")
    file = write(tmp_path / "sweep.yaml", "grid", {**SPACE, "method": {"value": "snapkv"}, "ratio": {"value": 0.2}})
    assert command.main(["run", str(file), f"--output_path={tmp_path / 'out'}"]) == 0
    run = read_run(tmp_path / "out/sweeps/sweep/wandb")
    assert (run["project"], run["group"], run["exit"]) == ("kvcompress", "sweep", 0)
    assert run["config"]["ratio"] == 0.2
    assert [items["accuracy"] for items in run["history"]] == [0.2]


def test_a_sweep_on_ray_has_the_cores_and_workers_that_are_asked_for(fake, tmp_path, monkeypatch):
    given = []

    def run_on_ray(sweep, *asked):
        given.append(asked)
        run_here(sweep)

    cluster = SimpleNamespace(run_on_ray=run_on_ray)
    monkeypatch.setitem(sys.modules, "lmms_eval_plugins.sweep.ray_cluster", cluster)
    argv = ["run", str(write(tmp_path / "sweep.yaml")), f"--output_path={tmp_path / 'out'}", "--ray", "local"]
    assert command.main(argv) == 0
    assert command.main([*argv, "--cpus-per-trial", "3", "--workers", "2"]) == 0
    assert given == [("local", 1, None), ("local", 3, 2)]


# -- killed


def columns(output: Path, name: str) -> list[list[str]]:
    """The table without the times, which no two runs share."""
    return [[*row[:4], *row[-2:]] for row in report_of(output, name)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grid", "bayes"])
def test_a_sweep_that_is_killed_ends_with_the_table_of_one_that_is_not(tmp_path, method):
    parameters = SPACE if method == "grid" else SEARCH
    file = write(tmp_path / "sweep.yaml", method, {**parameters, "batch_size": {"value": 4}}, run_cap=6)

    def begun(output: Path) -> subprocess.Popen:
        words = ["run", str(file), "--limit", "4", "--output_path", str(output)]
        return start("sweep", *words, WANDB_MODE="disabled")

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert begun(whole).wait() == 0
    killed = begun(cut)
    while not list(cut.glob("tiny_textvqa/tiny/snapkv-*/results.json")):  # then the next trial is running
        time.sleep(0.05)
        assert killed.poll() is None
    time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (cut / "sweeps/sweep-limit=4/report.md").exists()
    assert begun(cut).wait() == 0
    assert columns(cut, "sweep-limit=4") == columns(whole, "sweep-limit=4")
    states = optuna.load_study(
        study_name=None,
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(cut / "sweeps/sweep-limit=4" / JOURNAL_FILE))
        ),
    ).get_trials()
    assert all(found.state == optuna.trial.TrialState.COMPLETE for found in states)
