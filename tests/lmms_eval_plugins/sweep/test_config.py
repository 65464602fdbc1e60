"""Sweep files: wandb's schema, as far as a sweep without wandb's server can follow it."""

from pathlib import Path

import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from kvcompress.errors import KVCompressError
from lmms_eval_plugins.cells import names
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.sweep import __main__ as command
from lmms_eval_plugins.sweep.config import distribution, read_config
from lmms_eval_plugins.sweep.runner import check_trials
from lmms_eval_plugins.sweep.trial import cell_folder, parse_trial, trial_argv

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "sweeps").glob("*.yaml"))


def write(path: Path, **changes) -> Path:
    sweep = {
        "method": "grid",
        "parameters": {
            "task": {"value": "tiny_textvqa"},
            "model": {"value": "tiny"},
            "method": {"values": ["full", "snapkv"]},
            "ratio": {"values": [0.5, 0.2]},
        },
        **changes,
    }
    path.write_text(yaml.safe_dump({key: value for key, value in sweep.items() if value is not None}, sort_keys=False))
    return path


@pytest.fixture
def file(tmp_path):
    return lambda **changes: write(tmp_path / "sweep.yaml", **changes)


def test_a_sweep_of_each_method_is_shipped():
    methods = [read_config(path, {}).method for path in SHIPPED]
    assert {"grid", "random", "bayes"} == set(methods)
    assert len(SHIPPED) == 4


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_sweep_is_found_by_its_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_config(Path(path.stem), {}) == read_config(path, {})


@pytest.mark.parametrize("key", ["name", "description", "project", "entity", "program", "command", "run_cap"])
def test_keys_of_wandbs_schema_are_accepted(file, key):
    read_config(file(**{key: 3 if key == "run_cap" else "some"}), {})


def test_a_name_with_a_slash_is_one_folder(file):
    assert read_config(file(), {}, "ours/first").name == "ours__first"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_trial_of_a_shipped_sweep_can_be(path, tmp_path):
    check_trials(read_config(path, {}), tmp_path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_command_of_a_shipped_sweep_starts_a_trial_with_the_arguments_of_wandbs_agent(path):
    command = yaml.safe_load(path.read_text())["command"]
    assert command == ["${env}", "${interpreter}", "-m", "lmms_eval_plugins.sweep", "trial", "${args}"]
    config = read_config(path, {})
    given = {**config.constants, **config.corners()[0], "scorer": None, "safeguard": True}
    words = create_sweep_command_args({"args": {name: {"value": value} for name, value in given.items()}})["args"]
    assert parse_trial(words) == {**given, "scorer": "None"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"value": 8}, CategoricalDistribution([8])),
        ({"values": [0.5, "a", True, None]}, CategoricalDistribution([0.5, "a", True, None])),
        ({"min": 1, "max": 8}, IntDistribution(1, 8)),
        ({"min": 0.1, "max": 1}, FloatDistribution(0.1, 1)),
        ({"distribution": "uniform", "min": 0, "max": 1}, FloatDistribution(0, 1)),
        ({"distribution": "int_uniform", "min": 1, "max": 8}, IntDistribution(1, 8)),
        ({"distribution": "log_uniform_values", "min": 0.01, "max": 1}, FloatDistribution(0.01, 1, log=True)),
        ({"distribution": "q_uniform", "min": 8, "max": 32, "q": 8}, IntDistribution(8, 32, step=8)),
        ({"distribution": "q_uniform", "min": 0.1, "max": 0.5, "q": 0.1}, FloatDistribution(0.1, 0.5, step=0.1)),
        ({"distribution": "categorical", "values": ["max", "avg"]}, CategoricalDistribution(["max", "avg"])),
        ({"distribution": "constant", "value": "max"}, CategoricalDistribution(["max"])),
    ],
)
def test_parameters_mean_what_they_mean_to_wandb(given, expected):
    assert distribution("x", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (8, "parameter 'x': 8 is not value:, values:, or min: and max:"),
        (
            {"distribution": "normal", "mu": 0, "sigma": 1},
            "distribution 'normal' is not supported here; valid: constant,",
        ),
        ({"values": [1, 2], "probabilities": [0.1, 0.9]}, "categorical takes values, not probabilities, values"),
        ({"parameters": {"y": {"value": 1}}}, "uniform takes min, max, not parameters"),
        ({"values": []}, r"values \[\] is not a non-empty list"),
        ({"values": [[1]]}, r"value \[1\] is neither text, a number"),
        ({"values": [1, 2, True]}, r"values \[1, 2, True\] has duplicates"),
        ({"min": "1e-3", "max": 1}, "min '1e-3' is not a number"),
        ({"min": 2, "max": 1}, "min 2 is above max 1"),
        ({"distribution": "int_uniform", "min": 0.5, "max": 1}, "min 0.5 is not a whole number"),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "min 0 of log_uniform_values is not above 0"),
        ({"distribution": "q_uniform", "min": 1, "max": 8, "q": 3}, "min 1 and max 8 are not multiples of q 3"),
        ({"distribution": "q_uniform", "min": 1, "max": 8}, "q_uniform takes min, max, q, not max, min"),
    ],
)
def test_what_a_local_sweep_cannot_do_is_an_error_that_names_it(given, message):
    with pytest.raises(KVCompressError, match=message):
        distribution("x", given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "hyperband"}, "method 'hyperband' is not one of grid, random, bayes"),
        ({"parameters": None}, "is not a sweep file: it has no parameters"),
        ({"early_terminate": {"type": "hyperband"}}, "'early_terminate' is not supported here"),
        ({"parametres": {}}, r"'parametres' is not supported here \(did you mean 'parameters'\?\)"),
        ({"metric": {"name": "loss", "goal": "minimize"}}, "no trial logs the metric 'loss'; valid: accuracy,"),
        ({"metric": {"name": "accuracy", "goal": "max"}}, "metric goal 'max' is neither maximize nor minimize"),
        ({"metric": {"name": "accuracy", "target": 1}}, "is not a name and a goal"),
        ({"method": "bayes"}, "metric None is not a name and a goal"),
        ({"run_cap": 0}, "run_cap 0 is not a positive number of trials"),
        ({"parameters": {"ratio": {"min": 0.1, "max": 1.0}}}, "parameter 'ratio': a grid needs value or values"),
    ],
)
def test_a_wrong_sweep_file_is_an_error_that_says_why(file, changes, message):
    with pytest.raises(KVCompressError, match=message):
        read_config(file(**changes), {})


def test_a_metric_without_goal_is_minimised_as_in_wandb(file):
    assert read_config(file(metric={"name": "tpot_s"}), {}).goal == "minimize"
    assert read_config(file(), {}).goal == "maximize"


def test_an_override_replaces_a_parameter_and_names_the_sweep(file):
    config = read_config(file(), {"ratio": 0.1, "limit": 4})
    assert config.name == "sweep-ratio=0.1-limit=4"
    assert (config.constants["ratio"], config.constants["limit"]) == (0.1, 4)
    assert list(config.space) == ["method"]
    assert read_config(file(), {"limit": 4}, "mine").name == "mine"


def test_a_grid_holds_every_combination_once_and_changes_the_model_least_often(file):
    parameters = {"ratio": {"values": [0.5, 0.2]}, "method": {"value": "snapkv"}, "model": {"values": ["a", "b"]}}
    grid = read_config(file(parameters=parameters), {}).grid({"model"})
    assert [(trial["model"], trial["ratio"]) for trial in grid] == [("a", 0.5), ("a", 0.2), ("b", 0.5), ("b", 0.2)]


def test_trials_that_cannot_be_are_found_before_anything_runs(file, tmp_path):
    def check(**overrides):
        check_trials(read_config(file(), overrides), tmp_path / "results")

    check(limit=4, window_size=8)
    with pytest.raises(
        KVCompressError, match=r"parameter 'sinks' is an option of .*streamingllm.*, but of no method in this sweep"
    ):
        check(sinks=4)
    with pytest.raises(
        Exception,
        match=r"unknown parameter 'windowsize' \(did you mean 'window_size'\?\); valid: .*batch_size.*window_size",
    ):
        check(windowsize=4)
    with pytest.raises(Exception, match="there is no method 'snapvk'"):
        check(method="snapvk")
    assert not (tmp_path / "results").exists()


def test_a_sweep_may_be_of_tasks_of_lm_evaluation_harness(file, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "lm_eval_folder", lambda: tmp_path)
    monkeypatch.setattr(names, "lm_eval_tasks", lambda: {"niah_single_1": ("task", tmp_path)})
    check_trials(read_config(file(), {"task": "niah_single_1"}), tmp_path)


def test_parameters_become_the_arguments_of_the_evaluation_command(tmp_path):
    parameters = {"task": "t", "model": "tiny", "method": "snapkv", "ratio": 0.2, "limit": 4, "window_size": 8}
    request = parse(trial_argv({**parameters, "gen_kwargs": "max_new_tokens=4", "dtype": "float32"}, tmp_path))
    assert (request.tasks, request.model, request.methods, request.ratios) == (["t"], "tiny", ["snapkv"], [0.2])
    assert request.arguments == {"window_size": 8, "dtype": "float32"}
    assert (request.flags.limit, request.flags.gen_kwargs) == (4, {"max_new_tokens": 4})
    assert request.flags.output_path == tmp_path


def test_options_of_other_methods_and_nulls_are_left_out(tmp_path):
    parameters = {"task": "t", "model": "tiny", "ratio": 0.2, "window_size": 8, "sinks": None, "scorer": "None"}
    assert parse(trial_argv({**parameters, "method": "full"}, tmp_path)).arguments == {}
    assert parse(trial_argv({**parameters, "method": "snapkv"}, tmp_path)).arguments == {"window_size": 8}


def test_a_budget_takes_the_place_of_the_ratio_and_full_and_blind_need_neither(tmp_path):
    parameters = {"task": "tiny_textvqa", "model": "tiny", "budget": 64}
    assert cell_folder({**parameters, "method": "snapkv"}, tmp_path).name == "snapkv-budget=64"
    for method, name in (("full", "full-1"), ("blind", "blind-0")):
        assert cell_folder({**parameters, "method": method}, tmp_path).name == name
        assert cell_folder({**parameters, "budget": None, "method": method}, tmp_path).name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "a trial needs the parameter 'model'"),
        ({"task": "a,b"}, "task 'a,b': a trial has one task"),
        ({"method": "full,snapkv"}, "method 'full,snapkv': a trial has one method"),
        ({"method": "all"}, "method 'all': a trial has one method"),
        ({"ratio": "0.5,0.2"}, "a trial is one cell, not snapkv-0.5, snapkv-0.2: list several values under values:"),
        ({"method": "random", "seed": "1..2"}, "a trial is one cell, not random-0.2-seed=1, random-0.2-seed=2"),
        ({"ratio": None}, "give either RATIO, or '-' for RATIO and budget=ENTRIES"),
    ],
)
def test_a_trial_that_is_not_one_cell_is_an_error(changes, message, tmp_path):
    parameters = {"task": "tiny_textvqa", "model": "tiny", "method": "snapkv", "ratio": 0.2, **changes}
    with pytest.raises(KVCompressError, match=message):
        cell_folder(parameters, tmp_path)


def test_arguments_of_a_trial_without_equals_sign_are_an_error():
    with pytest.raises(KVCompressError, match="'--limit' is not --name=value"):
        parse_trial(["--task=a", "--limit", "4"])


def test_a_trial_without_a_task_and_what_is_no_trial_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert command.main(["trial", "--model=tiny", "--method=snapkv", "--ratio=0.2"]) == 2
    assert "a trial needs the parameter 'task'" in capsys.readouterr().err
    assert command.main(["sweep"]) == 2
    assert capsys.readouterr().err.startswith("error: 'sweep' is neither run nor trial")
