"""scripts/bench_gpu.sh: what it runs can be read by whom it is for, a cut loses one cell, a failure none."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import runner
from benchmarks.gpu.runner import Stage, counted
from benchmarks.gpu.stages import Cell, cells, environment_of
from benchmarks.gpu.summary import MOST_LINES, summarised
from tests.support.docs import ROOT
from tests.support.parse_only import check

WRITES = "import json, sys; json.dump({}, open(sys.argv[1] + '.json', 'w'))"


def cell(name, code, seconds=60.0, kind="environment"):
    return Cell(name, kind, ("-c", code, "{out}"), seconds)


def wrote(number):
    return WRITES.replace("{}", repr({"number": number}))


@pytest.fixture
def stage(tmp_path):
    return Stage(1, True, tmp_path / "out", tmp_path / "parts")


@pytest.mark.parametrize("smoke", [False, True], ids=["device", "smoke"])
@pytest.mark.parametrize("number", command.STAGES)
def test_the_parser_of_each_cells_command_takes_its_words(number, smoke, pytestconfig):
    for one in cells(number, smoke, workers=6):
        check(" ".join(["python", *one.arguments]), pytestconfig)


def test_a_failure_stops_nothing_and_its_last_lines_are_kept(stage):
    stage.run([cell("breaks", "print('before'); 1 / 0"), cell("goes on", wrote(1))], 300, False)
    assert stage.records["breaks"]["state"] == "failed"
    assert stage.records["breaks"]["tail"][0] == "before"
    assert "ZeroDivisionError" in stage.records["breaks"]["tail"][-1]
    assert stage.records["goes on"]["result"] == {"number": 1}
    assert json.loads(stage.file.read_text())["cells"] == stage.records


def test_a_cell_that_is_done_runs_again_only_by_force_or_with_another_command(stage):
    def time_of_run(code, force=False):
        again = Stage(1, True, stage.out, stage.parts)
        again.run([cell("one", code)], 300, force)
        return again.records["one"]["result"]

    code = WRITES.replace("{}", "__import__('time').time()")
    first = time_of_run(code)
    assert time_of_run(code) == first
    assert (forced := time_of_run(code, force=True)) > first
    assert time_of_run(f"{code}  # another") > forced


def test_what_another_command_wrote_is_no_result_of_a_cell(stage):
    stage.run([cell("one", wrote(1))], 300, False)
    stage.run([cell("one", "1 / 0")], 300, False)
    assert stage.records["one"]["state"] == "failed"
    assert "result" not in stage.records["one"]


def test_a_cell_that_takes_too_long_ends_with_all_that_it_started_and_keeps_what_it_wrote(stage, tmp_path):
    mark = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(mark)!r}, 'w').close(); time.sleep(0.05)"
    code = f"{wrote(3)}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    stage.run([cell("long", code, seconds=3), cell("next", wrote(4))], 300, False)
    assert stage.records["long"]["state"] == "cut"
    assert stage.records["long"]["result"] == {"number": 3}
    assert stage.records["next"]["state"] == "done"
    mark.unlink()  # it had begun
    time.sleep(0.3)
    assert not mark.exists()


def test_without_time_a_cell_is_left_out_and_what_was_known_of_it_stays(stage, monkeypatch):
    stage.run([cell("known", wrote(5))], 300, False)
    monkeypatch.setattr(runner, "LEAST", 1000.0)
    stage.run([cell("known", wrote(6)), cell("new", wrote(7))], 300, False)
    assert stage.records["known"]["result"] == {"number": 5}
    assert stage.records["new"]["state"] == "left out"


def test_tests_are_counted_by_their_own_lines_and_not_by_the_summary():
    output = """
tests/gpu/a.py::test_one PASSED                                          [ 20%]
[gw1] [ 40%] FAILED tests/gpu/a.py::test_two[fp16]
tests/gpu/a.py::test_three SKIPPED (no flash-attn)
[gw0] [ 60%] PASSED tests/gpu/b.py::test_one
tests/gpu/b.py::test_four ERROR
=========================== short test summary info ============================
FAILED tests/gpu/a.py::test_two[fp16] - AssertionError
ERROR tests/gpu/b.py::test_four - RuntimeError
"""
    assert counted(output) == {
        "passed": 2,
        "skipped": 1,
        "failed": ["tests/gpu/a.py::test_two[fp16]", "tests/gpu/b.py::test_four"],
    }


@pytest.mark.parametrize("number", command.STAGES)
def test_a_summary_has_few_lines_even_where_everything_failed(number):
    chosen = cells(number, False)
    records = {one.name: {"state": "failed", "seconds": 1.0, "tail": ["x" * 500] * 25} for one in chosen}
    lines = summarised(number, chosen, records).splitlines()
    assert len(lines) <= MOST_LINES
    assert sum("not measured" in line for line in lines) >= 1
    assert not any("| met |" in line or "| missed |" in line for line in lines)


@pytest.mark.parametrize(("apart", "verdict"), [(4, "met"), (5, "missed")])
def test_a_target_is_met_or_missed_by_what_was_measured(apart, verdict):
    chosen = [one for one in cells(1, False) if one.name == "accuracy"]
    right = [True] * 50 + [False] * 50
    other = [True] * (50 - apart) + [False] * (50 + apart)
    tables = {"cpu": {"full": right}, "device": {"full": other}}
    records = {"accuracy": {"state": "done", "seconds": 1.0, "result": {"questions": 100, "tables": tables}}}
    line = next(line for line in summarised(1, chosen, records).splitlines() if "accuracy, device " in line)
    assert verdict in line
    assert f"{apart:.1f} points" in line


def test_a_missing_package_is_one_line_and_a_wrong_cell_another(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--stage", "1", "--smoke", "--out", str(tmp_path), "--only", "warp"])
    assert command.main() == 2
    assert "no cell warp" in capsys.readouterr().err
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "hypothesis" else object())
    assert command.main() == 2
    assert capsys.readouterr().err == "error: not installed: hypothesis (pip install hypothesis)\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"), [(number, one.name) for number in command.STAGES for one in cells(number, True)]
)
def test_a_cell_of_a_device_runs_on_a_pretended_one_with_the_named_packages_alone(number, name, tmp_path):
    """With tiny shapes, some of the tests and few questions, uncompiled: there is no device to compile for."""
    (one,) = (one for one in cells(number, True) if one.name == name)
    words = [word.replace("{out}", str(tmp_path / "part")) for word in one.arguments if word != "--compile"]
    words = ["cuda" if word == "cpu" else word for word in words]
    if name == "accuracy":
        words[words.index("--questions") + 1] = "2"
    known = {**os.environ, **environment_of(False, one.kind), "OMP_NUM_THREADS": "1", "PRETENDED_EVERY": "60"}
    rehearsal = [sys.executable, "-m", "tests.gpu.rehearse", *words[1:]]
    done = subprocess.run(rehearsal, env=known, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if one.kind != "tests":
        json.loads((tmp_path / "part.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("number", command.STAGES)
def test_the_smoke_run_of_a_stage_ends_with_every_cell_done(number, tmp_path):
    words = ["--stage", str(number), "--smoke", "--out", str(tmp_path / "out"), "--parts", str(tmp_path / "parts")]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ROOT / "scripts" / "bench_gpu.sh", *words], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) <= MOST_LINES
