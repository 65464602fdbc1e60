"""scripts/reproduce.sh: a paper's grid, run by evaluate, in a table beside the paper's numbers."""

import json
import os
import re
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import names
from lmms_eval_plugins.cells.identity import fingerprint
from lmms_eval_plugins.cells.results import dumps
from lmms_eval_plugins.reproduce import run
from lmms_eval_plugins.reproduce.__main__ import main
from lmms_eval_plugins.reproduce.config import CONFIGS, load_config, load_reference
from lmms_eval_plugins.reproduce.plan import plan
from lmms_eval_plugins.reproduce.table import interval
from tests.support.evaluation import ended
from tests.support.result_cells import write_answers as write

pytestmark = pytest.mark.usefixtures("clean_process")
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))

MINIMAL = {
    "title": "A paper",
    "paper": "https://example.org",
    "about": "About it.",
    "models": [{"name": "M", "pretrained": "m", "gpu": False}],
    "benchmarks": [
        {"name": "One", "task": "one", "remark": "Another split."},
        {"name": "Judged", "task": None, "needs": "a judge"},
    ],
    "methods": [{"name": "Full", "method": "full"}, {"name": "KNorm", "method": "knorm"}],
    "ratios": [0.5, 0.25],
}


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """Writes a configuration with changes, and its reference. lmms-eval seems to have its tasks."""
    installed = names.installed_tasks() | {name: ("task", tmp_path) for name in ("one", "two")}
    monkeypatch.setattr(names, "installed_tasks", lambda: installed)

    def write_file(values=None, **changes):
        if values is not None:
            lines = ["model,method,ratio_kept,benchmark,value,est_error_abs", *values]
            (tmp_path / "paper.csv").write_text("\n".join(lines) + "\n")
            changes |= {"reference": "paper.csv", "source": "read from the figure"}
        path = tmp_path / "paper.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **changes}))
        return str(path)

    return write_file


@pytest.fixture
def executed(monkeypatch):
    """The calls of evaluate, none of which runs; `executed.answer` is what each returns."""

    class Calls(list):
        answer = (0, "")

    calls = Calls()

    def execute(argv):
        calls.append(list(argv))
        if isinstance(calls.answer, BaseException):
            raise calls.answer
        return calls.answer

    monkeypatch.setattr(run, "execute", execute)
    monkeypatch.setattr(run, "_hub_is_there", lambda: True)
    return calls


def table(folder, name="reproduce-paper"):
    """The CSV as {(benchmark, method, ratio): row}, and the Markdown."""
    frame = pd.read_csv(folder / f"{name}.csv").astype(object)
    assert frame.columns[0] == "model", "no number of the row before it"
    rows = frame.where(frame.notna(), None).to_dict("records")
    return {(row["benchmark"], row["method"], row["ratio"]): row for row in rows}, (folder / f"{name}.md").read_text()


# -- the files


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_valid_and_every_reference_value_has_its_cell(name):
    config, path = load_config(name)
    reference = load_reference(config, path)
    cells, runs = plan(config, {}, [])
    keys = [cell.key for cell in cells]
    assert len(keys) == len(set(keys))
    assert set(reference) <= set(keys)
    assert {cell.key for planned in runs for cell in planned.cells} == {cell.key for cell in cells if cell.folder}


@pytest.mark.parametrize("name", SHIPPED)
def test_tasks_and_metrics_of_shipped_files_are_a_harness_s(name):
    config, _ = load_config(name)
    tasks = {benchmark.task: benchmark.metric for benchmark in config.benchmarks if benchmark.task}
    of_text = {task: tasks.pop(task) for task in list(tasks) if names.is_lm_eval(task)}
    for task, metric in tasks.items():
        text = task_files(task)
        assert f"metric: {metric}" in text or ("official: textvqa/" in text and metric == "exact_match")
        assert "output_type: multiple_choice" not in text  # a likelihood, which is not evaluated
    if of_text and not names.lm_eval_folder():
        pytest.skip("lm-eval is not installed")
    for task, metric in of_text.items():
        _, file = names.lm_eval_tasks()[task]
        assert re.search(f'metric: "?{metric}', file.read_text())


def task_files(task):
    """The text of a task's file with the one that it includes; of a group, of its tasks' files."""
    _, path = names.installed_tasks()[task]
    text = path.read_text()
    if "group:" in text:
        return "\n".join(task_files(each) for each in re.findall(r"^ *- (\w+)$", text, flags=re.MULTILINE))
    included = re.findall(r"^include: *(\S+)$", text, flags=re.MULTILINE)
    return text + "".join((path.parent / name).read_text() for name in included)


@pytest.mark.parametrize("name", ["snapkv", "reasoning"])
def test_grids_of_text_dry_run_with_and_without_lm_eval(name, monkeypatch, capsys):
    for module in (names, run):
        monkeypatch.setattr(module, "lm_eval_folder", lambda: None)
    assert main([name, "--dry-run", "device=cpu"]) == 0
    assert "needs lm-evaluation-harness: " in capsys.readouterr().out
    for module in (names, run):
        monkeypatch.setattr(module, "lm_eval_folder", lambda: Path("installed"))
    assert main([name, "--dry-run", "device=cpu"]) == 0
    assert "lm-evaluation-harness" not in capsys.readouterr().out


def test_the_flags_of_a_benchmark_are_those_of_its_calls():
    _, runs = plan(load_config("reasoning")[0], {}, ["device=cpu"])
    templates = {call.cells[0].benchmark.name: call.plan.request.flags.apply_chat_template for call in runs}
    assert templates == {"AIME24": True, "MATH-500": None}
    assert {call.plan.request.flags.gen_kwargs.get("max_new_tokens") for call in runs} == {None, 16384}
    assert {cell.asked[1].get("decode_budget") for call in runs for cell in call.cells} == {None, 2048, 1024, 512}


def test_effivlm_bench_is_the_whole_figure_with_its_variants():
    config, path = load_config("effivlm_bench")
    reference = load_reference(config, path)
    cells, runs = plan(config, {}, [])
    assert len(reference) == len(cells) == 744
    assert reference["Qwen2-VL-7B", "TextVQA", "Original", "1"] == (81.9, 0.13)
    assert "read from the figure" in config.source
    textvqa = [planned for planned in runs if planned.cells[0].key[:2] == ("Qwen2-VL-7B", "TextVQA")]
    asked = {cell.method: cell for planned in textvqa for cell, _ in planned.plan.cells}
    assert all(cell.settings == {"max_pixels": 700 * 28 * 28} for cell in asked.values())
    assert {name: cell.options for name, cell in asked.items()} == {
        "full": {},
        "streamingllm": {"variant": "effivlm"},
        "h2o": {"variant": "effivlm"},
        "snapkv": {"variant": "effivlm"},
        "pyramidkv": {"variant": "effivlm", "layer_budget": "pyramid-effivlm"},
        "vl-cache": {"variant": "effivlm", "layer_budget": "sparsity-effivlm", "head_budget": "shared"},
        "look-m": {"variant": "effivlm"},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": [0.5]}, "ratio: Extra inputs are not permitted"),
        ({"models": []}, "models: List should have at least 1 item"),
        ({"ratios": [0.5, 2.0]}, "ratio=2.0 is not in (0, 1]"),
        ({"ratios": []}, "give either ratios or budgets"),
        ({"budgets": [64]}, "give either ratios or budgets"),
        ({"methods": [{"name": "X", "method": "snapkvv"}]}, "did you mean 'snapkv'?"),
        ({"methods": [{"name": "X", "method": "knorm", "options": {"sinks": 4}}]}, "sinks"),
        ({"methods": [{"name": "X", "method": "knorm", "models": ["N"]}]}, "method X: no model 'N'"),
        ({"methods": [{"name": "X", "method": "knorm"}] * 2}, "duplicate method for M: X, X"),
        (
            {"methods": [{"name": "X", "method": "knorm", "models": ["M"]}, {"name": "X", "method": "tova"}]},
            "duplicate method for M: X, X",
        ),
        ({"models": [{"name": "M", "pretrained": "m"}] * 2}, "duplicate name among models: M, M"),
        ({"models": [{"name": "M", "pretrained": None}]}, "`needs` says why pretrained is null"),
        ({"benchmarks": [{"name": "B", "task": "b", "needs": "x"}]}, "`needs` says why task is null"),
        ({"reference": "paper.csv"}, "reference and source belong together"),
        ({"reference": "other.csv", "source": "x"}, "does not exist"),
    ],
)
def test_a_wrong_file_is_one_line_and_code_2(configuration, capsys, changes, message):
    assert main([configuration(**changes)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_reference_that_does_not_fit_the_file_is_an_error(configuration, capsys):
    assert main([configuration(["N,KNorm,0.5,One,1,1"])]) == 2
    assert "model 'N' is not in paper.yaml, which has M" in capsys.readouterr().err
    path = configuration([])
    (Path(path).parent / "paper.csv").write_text("model,value\n")
    assert main([path]) == 2
    assert "no column method, ratio_kept, benchmark, est_error_abs" in capsys.readouterr().err


# -- the cells


def test_methods_share_a_call_where_each_still_gets_exactly_its_options(configuration):
    methods = [
        {"name": "Full", "method": "full"},
        {"name": "A", "method": "snapkv", "options": {"window_size": 8}},
        {"name": "B", "method": "knorm"},  # has no window_size, so it may join
        {"name": "C", "method": "pyramidkv"},  # has one, so it may not
        {"name": "D", "method": "h2o", "options": {"merge": "pivot"}},  # every method has merge
    ]
    config, _ = load_config(configuration(methods=methods))
    _, runs = plan(config, {}, ["--limit", "4"])
    assert [planned.argv for planned in runs] == [
        ["one", "m", "full,snapkv,knorm", "0.5,0.25", "window_size=8", "--limit", "4"],
        ["one", "m", "pyramidkv", "0.5,0.25", "--limit", "4"],
        ["one", "m", "h2o", "0.5,0.25", "merge=pivot", "--limit", "4"],
    ]


def test_budgets_take_the_place_of_ratios(configuration):
    config, _ = load_config(configuration(ratios=[], budgets=[64, 32]))
    cells, (planned,) = plan(config, {}, [])
    assert planned.argv == ["one", "m", "full,knorm", "-", "budget=64,32"]
    assert [cell.key[2:] for cell in cells[:3]] == [("Full", "1"), ("KNorm", "64"), ("KNorm", "32")]
    assert cells[1].folder == Path("results/one/m/knorm-budget=64")


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("ratio=0.25", ["one m knorm 0.25"]),
        ("ratio=1", ["one m full 1"]),
        ("method=KNORM,ratio=0.50", ["one m knorm 0.5"]),
        ("task=one,method=Full,method=knorm,ratio=1,ratio=0.5", ["one m full,knorm 0.5"]),
        ("task=one;ratio=0.5;method=knorm", ["one m knorm 0.5"]),
        ("task=Judged", []),
    ],
)
def test_only_takes_names_of_the_paper_and_ours(configuration, executed, only, expected):
    main([configuration(), *(word for part in only.split(";") for word in ("--only", part))])
    assert [" ".join(argv[:4]) for argv in executed] == expected


def with_fingerprint(folder: Path, path: str, ratio: float, **changes) -> None:
    """Let a cell's results say that they are those which a run would compute."""
    _, runs = plan(load_config(path)[0], {}, [])
    (own,) = [cell.asked for cell in runs[0].cells if (cell.method.method, cell.size) == ("knorm", {"ratio": ratio})]
    file = folder / f"knorm-{ratio}" / "results.json"
    made = {**fingerprint(own[0], runs[0].plan.arguments, own[1], data={"one": "x"}, tasks={"one": "y"}), **changes}
    file.write_text(dumps({**json.loads(file.read_text()), "fingerprint": made}))


@pytest.mark.parametrize(
    ("changes", "flags", "state"),
    [
        ({}, [], "on disk"),
        ({}, ["--force"], "to run again (--force)"),
        ({"code": "older"}, [], "to run again (changed since: code)"),
        (None, [], "to run again (results.json is damaged: no fingerprint)"),
    ],
)
def test_dry_run_says_which_results_on_disk_a_run_would_compute_again(
    configuration, capsys, executed, tmp_path, changes, flags, state
):
    folder, path = write(tmp_path / "results", "one", "knorm", 0.5, "abcx"), configuration()
    if changes is not None:
        with_fingerprint(folder, path, 0.5, **changes)
    (folder / "knorm-0.25").mkdir()
    assert main([path, "--dry-run", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"M, One, KNorm, 0.5: {state}"
    assert lines[2] == "M, One, KNorm, 0.25: to run again (results.json is missing)"


def test_dry_run_lists_cells_and_commands_and_writes_nothing(configuration, capsys, executed, tmp_path):
    path = configuration()
    with_fingerprint(write(tmp_path / "results", "one", "knorm", 0.5, "abcx"), path, 0.5)
    before = sorted(tmp_path.rglob("*"))
    assert main([path, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "M, One, Full, 1: to run",
        "M, One, KNorm, 0.5: on disk",
        "M, One, KNorm, 0.25: to run",
        *(f"M, Judged, {name}: needs a judge" for name in ("Full, 1", "KNorm, 0.5", "KNorm, 0.25")),
        "python -m kvcompress eval one m full,knorm 0.5,0.25 --output_path=results",
        "6 cells; needs a judge: 3; to run: 2; on disk: 1",
    ]
    assert not executed
    assert sorted(tmp_path.rglob("*")) == before


# -- running


def test_what_is_no_flag_of_ours_goes_to_evaluate(configuration, executed):
    main([configuration(), "--limit", "4", "device=cpu", "--data-root", ".", "--output_path=-out"])
    assert executed[0][4:] == ["device=cpu", "--data-root", ".", "--output_path=-out", "--limit", "4"]


def test_a_failed_call_stops_nothing_else_and_stands_in_the_table(configuration, executed, tmp_path):
    executed.answer = (1, "model 'm' could not be loaded")
    benchmarks = [{"name": name, "task": name.lower()} for name in ("One", "Two")]
    assert main([configuration(benchmarks=benchmarks), "--only", "ratio=0.5"]) == 1
    assert len(executed) == 2
    rows, text = table(tmp_path / "results")
    assert rows["Two", "KNorm", 0.5]["note"] == "failed: model 'm' could not be loaded"
    assert "| KNorm | 0.5 | missing | - | - | - | - | failed: model 'm' could not be loaded |" in text


def test_a_result_of_before_a_failed_call_is_not_shown_as_the_call_s(configuration, executed, tmp_path):
    executed.answer = (1, "model 'm' could not be loaded")
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    assert main([configuration(["M,KNorm,0.5,One,75,1"]), "--only", "ratio=0.5"]) == 1
    rows, text = table(tmp_path / "results")
    assert "0 of 0 inside both errors" in text, "what this run did not measure is not judged"
    note = "perhaps of an earlier run, as this one failed: model 'm' could not be loaded"
    assert rows["One", "KNorm", 0.5]["note"].endswith(note)


@pytest.mark.parametrize(("changes", "note"), [({}, ""), ({"code": "older"}, ", changed since: code")])
def test_a_result_that_a_run_would_compute_again_is_named_as_such(configuration, tmp_path, changes, note):
    path = configuration(["M,KNorm,0.5,One,75,1"])
    with_fingerprint(write(tmp_path / "results", "one", "knorm", 0.5, "abcx"), path, 0.5, **changes)
    assert main([path, "--report-only"]) == 0
    found = table(tmp_path / "results")[0]["One", "KNorm", 0.5]
    assert (found["note"], found["inside"]) == (f"4 questions{note}", None if changes else True)


def test_ctrl_c_ends_with_the_table_of_what_is_there(configuration, executed, tmp_path, capsys):
    executed.answer = KeyboardInterrupt()
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    assert main([configuration()]) == 130
    assert "finished cells are kept" in capsys.readouterr().err
    rows, _ = table(tmp_path / "results")
    assert (rows["One", "KNorm", 0.5]["ours"], rows["One", "Full", 1.0]["note"]) == (75, "not run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_same_way(configuration, monkeypatch, tmp_path, capsys, number):
    monkeypatch.setattr(run, "_hub_is_there", lambda: True)
    monkeypatch.setattr(run, "execute", lambda argv: os.kill(os.getpid(), number))
    assert main([configuration()]) == 128 + number
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: ended by {number.name}; finished cells are kept")
    assert table(tmp_path / "results")[0]["One", "Full", 1.0]["note"] == "not run"


def test_damaged_results_are_named_in_the_table(configuration, tmp_path):
    folder = write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    (folder / "knorm-0.5" / "results.json").write_text("[]")
    assert main([configuration(), "--report-only"]) == 0
    note = table(tmp_path / "results")[0]["One", "KNorm", 0.5]["note"]
    assert note == "results.json is damaged: not an object but list"


def test_ratios_that_six_digits_do_not_tell_apart_are_two(configuration, executed, tmp_path):
    assert main([configuration(ratios=[0.1234567, 0.1234568])]) == 0
    assert executed[0][3] == "0.1234567,0.1234568"
    assert {key[2] for key in table(tmp_path / "results")[0]} >= {0.1234567, 0.1234568}


def test_without_a_gpu_nothing_is_tried_and_the_reason_is_given(configuration, executed, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = configuration(models=[{"name": "M", "pretrained": "m"}])
    assert main([path]) == 1
    assert not executed
    assert "needs a GPU" in table(tmp_path / "results")[0]["One", "Full", 1.0]["note"]
    main([path, "device=cpu"])
    assert len(executed) == 1


def test_without_hub_the_model_is_named_and_model_root_brings_it(configuration, executed, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_hub_is_there", lambda: False)
    path = configuration(models=[{"name": "M", "pretrained": "org/m", "gpu": False}])
    assert main([path]) == 1
    assert "`hf download org/m" in table(tmp_path / "results")[0]["One", "Full", 1.0]["note"]
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.json").write_text("{}")
    main([path, "--model-root", str(tmp_path / "models")])
    assert [argv[1] for argv in executed] == [str(tmp_path / "models" / "m")]


def test_execute_gives_exit_code_and_error_line(capfd):
    assert run.execute(["one", "m", "full", "7"])[0] == 2
    code, error = run.execute(["one"])
    assert (code, error.startswith("MODEL is missing")) == (2, True)
    assert "error: MODEL is missing" in capfd.readouterr().err  # and it is still shown


# -- the table


def test_ours_beside_theirs_with_difference_and_both_errors(configuration, tmp_path):
    write(tmp_path / "results", "one", "full", 1.0, "abcd")  # 100, of 4 questions that are all the same
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")  # 75, standard error 10
    write(tmp_path / "results", "one", "knorm", 0.25, "axxx")  # 25
    path = configuration(["M,Full,1,One,100,1", "M,KNorm,0.5,One,95,0.5", "M,KNorm,0.25,One,44,0.5"])
    assert main([path, "--report-only"]) == 0
    rows, text = table(tmp_path / "results")
    far, near = rows["One", "KNorm", 0.5], rows["One", "KNorm", 0.25]
    assert (far["ours"], far["stderr"], far["theirs"], far["reading_error"]) == (75, 10, 95, 0.5)
    assert (far["difference"], far["inside"]) == (-20, True)  # 1.96 * 10 + 0.5 = 20.1
    assert (near["difference"], near["inside"], near["source"]) == (-19, True, "read from the figure")
    assert "| KNorm | 0.5 | 75.0 ± 10.0 | 95.0 ± 0.5 | -20.0 | - | yes | 4 questions |" in text
    assert "6 cells, 3 with a result; 3 of 3 inside both errors" in text
    assert "**Theirs: read from the figure.**" in text
    assert "Rank correlation of ours and theirs over 3 cells: 1.00." in text
    assert "Another split." in text
    assert "| Full | 1 | missing | - | - | - | - | needs a judge |" in text


def test_a_reference_may_lack_a_value_or_its_reading_error(configuration, tmp_path):
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    write(tmp_path / "results", "one", "knorm", 0.25, "abcx")
    path = configuration(["M,KNorm,0.5,One,95,", "M,KNorm,0.25,One,,", "M,Full,1,One,90,1"])
    assert main([path, "--report-only"]) == 0
    rows, text = table(tmp_path / "results")
    known, unknown = rows["One", "KNorm", 0.5], rows["One", "KNorm", 0.25]
    assert (known["difference"], known["inside"], unknown["theirs"], unknown["difference"]) == (-20, None, None, None)
    assert "| KNorm | 0.5 | 75.0 ± 10.0 | 95.0 | -20.0 | - | - | 4 questions |" in text
    assert "| KNorm | 0.25 | 75.0 ± 10.0 | - | - | - | - | 4 questions |" in text


def test_a_difference_beyond_both_errors_is_outside(configuration, tmp_path):
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    main([configuration(["M,KNorm,0.5,One,95.2,0.5"]), "--report-only"])
    rows, text = table(tmp_path / "results")
    assert rows["One", "KNorm", 0.5]["inside"] is False
    assert "0 of 1 inside both errors" in text


def test_equal_scores_on_all_questions_have_an_interval_all_the_same():
    # One right answer: where 5 % are right, one shows in one of 20 draws.
    assert interval(0.0, 1, 100) == pytest.approx(95)
    # 30 right answers: where 9.5 % are wrong, 0.905 ** 30 = 0.05, so that all are right in one of 20 draws.
    assert interval(0.0, 30, 100) == pytest.approx(9.5, rel=0.01)
    assert interval(2.0, 30, 100) == pytest.approx(3.92)
    assert interval(None, 30, 100) is None


def test_answers_that_cannot_see_compression_are_named(configuration, tmp_path):
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx", tokens=2, protocol={"first_token": "full"})
    write(tmp_path / "results", "one", "knorm", 0.25, "abcx", tokens=9, protocol={"first_token": "full"})
    main([configuration(), "--report-only"])
    rows, text = table(tmp_path / "results")
    assert (rows["One", "KNorm", 0.5]["short"], rows["One", "KNorm", 0.25]["short"]) == (True, False)
    assert "| 4 questions, short answers |\n" in text
    assert "| 4 questions |\n" in text
    assert text.count("Short answers: the median answer has 1 or 2 tokens. With first_token=full") == 1


def test_a_share_that_is_not_the_ratio_asked_is_named(configuration, tmp_path):
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx", realised=0.72)
    main([configuration(), "--report-only"])
    assert "| 4 questions, kept 0.720 |\n" in table(tmp_path / "results")[1]


def test_metric_and_scale_are_those_of_the_file(configuration, tmp_path):
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    benchmark = {"name": "One", "task": "one", "metric": "acc", "scale": 1000}
    main([configuration(benchmarks=[benchmark]), "--report-only"])
    assert table(tmp_path / "results")[0]["One", "KNorm", 0.5]["ours"] == 750
    write(tmp_path / "results", "one", "full", 1.0, "abcd")
    file = tmp_path / "results" / "one" / "m" / "full-1" / "results.json"
    file.write_text(file.read_text().replace('"acc,none"', '"anls,none"'))
    assert main([configuration(benchmarks=[benchmark]), "--report-only"]) == 0
    rows, _ = table(tmp_path / "results")
    assert rows["One", "KNorm", 0.5]["ours"] == 750, "a cell without the metric costs no other"
    assert rows["One", "Full", 1.0]["note"].endswith("scores have no acc: anls,none, acc_stderr,none")


def test_another_limit_is_another_table(configuration, tmp_path):
    write(tmp_path / "results", "one", "knorm", 0.5, "ab", truth="ab", settings={"limit": 2})
    main([configuration(), "--report-only", "--limit", "2"])
    assert table(tmp_path / "results", "reproduce-paper-limit=2")[0]["One", "KNorm", 0.5]["note"] == "2 questions"


def test_our_results_become_a_reference_that_reads_back_as_equal(configuration, tmp_path, capsys):
    write(tmp_path / "results", "one", "knorm", 0.5, "abcx")
    main([configuration(), "--report-only", "--write-reference", str(tmp_path / "ours.csv")])
    lines = (tmp_path / "ours.csv").read_text().splitlines()
    assert lines == ["model,method,ratio_kept,benchmark,value,est_error_abs", "M,KNorm,0.5,One,75.0,19.6"]
    main([configuration(lines[1:]), "--report-only"])
    assert table(tmp_path / "results")[0]["One", "KNorm", 0.5]["difference"] == 0
    assert main([configuration(), "--report-only", "--only", "method=Full", "--write-reference", "x"]) == 2
    assert "there is no result to write" in capsys.readouterr().err


# -- the whole path


@pytest.mark.usefixtures("plots_not_drawn")
def test_the_bundled_model_is_compared_with_its_recorded_results_and_resumes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "execute", lambda argv: (evaluate.main(list(argv)), ""))  # without a new process
    command = ["tiny", "--limit", "2", "--only", "ratio=1,ratio=0.2"]
    assert main(command) == 0
    rows, text = table(tmp_path / "results", "reproduce-tiny-limit=2")
    assert {key[1] for key in rows} == {"Full", "SnapKV", "StreamingLLM", "H2O"}
    assert all(row["ours"] is not None and row["theirs"] is not None for row in rows.values())
    assert (rows["signs", "Full", 1.0]["ours"], rows["signs", "Full", 1.0]["inside"]) == (100, True)
    assert text.count("2 questions |") == 4
    monkeypatch.setattr(evaluate, "load_model", None)  # which nothing calls any more
    assert main(command) == 0
    assert "4 of 4 cells are complete and skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_by_hand(tmp_path):
    code, said = ended("reproduce", "tiny", "--limit", "4")
    assert code == 0, said
    rows, _ = table(tmp_path / "results", "reproduce-tiny-limit=4")
    assert [row["note"] for row in rows.values()] == ["4 questions"] * 7
