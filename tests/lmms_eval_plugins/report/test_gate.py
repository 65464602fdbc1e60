"""Which questions are answered blind, and where the full cache is too weak to compare with."""

import json

import pytest

from lmms_eval_plugins.report.gate import weak_below
from lmms_eval_plugins.report.groups import load_groups
from lmms_eval_plugins.report.html.data import page_data
from lmms_eval_plugins.report.metrics_command import main
from lmms_eval_plugins.report.table_command import main as table
from tests.support.result_cells import write_answers

TRUTH = "ab" * 10 + "cdefghijklmnopqrstuv"  # 40 questions; of 10 the answer is a, of 10 b


def write(root, method, right, truth=TRUTH, targets=None):
    """A cell that answers the questions `right` rightly."""
    answers = "".join(letter if n in right else "X" for n, letter in enumerate(truth))
    ratio = {"full": 1.0, "blind": 0.0}.get(method, 0.5)
    return write_answers(root, "one", method, ratio, answers, truth, realised=ratio or 0.1, targets=targets)


def warnings(capsys, folder):
    assert main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["warnings"], found["answered_blind"]


def test_questions_that_are_answered_blind_are_named(tmp_path, capsys):
    folder = write(tmp_path, "full", range(40))
    assert warnings(capsys, folder) == ([], [])
    write(tmp_path, "blind", [3, 17])
    lines, blind = warnings(capsys, folder)
    assert lines == ["one: 2 of 40 questions are answered blind: 3, 17"]
    assert blind == [{"task": "one", "doc_id": 3}, {"task": "one", "doc_id": 17}]
    write(tmp_path, "blind", range(22))
    lines, blind = warnings(capsys, folder)
    assert lines[0].endswith(", 18, 19 and 2 more (kvcompress metrics --json names all)")
    assert len(blind) == 22


def test_a_cell_with_fewer_questions_than_the_others_is_marked_wherever_its_score_is_shown(tmp_path, capsys):
    folder = write(tmp_path, "full", range(40))
    write_answers(tmp_path, "one", "snapkv", 0.5, TRUTH[:30], TRUTH[:30])
    line = "one: scores over different questions do not compare: snapkv (0.5) has 30 of 40"
    assert warnings(capsys, folder)[0] == [line]
    assert page_data(load_groups(folder))["groups"][0]["warning"] == line
    assert table([str(folder)]) == 0
    written = (folder / "report.md").read_text()
    assert line in capsys.readouterr().out
    assert line in written
    assert "| 30 of 40 |" in written
    write_answers(tmp_path, "one", "snapkv", 0.5, TRUTH, TRUTH, options={"seed": 1})
    assert table([str(folder)]) == 0
    assert "snapkv draws=2 (0.5) has 30 of 40" in capsys.readouterr().out


def test_a_cell_of_a_task_that_has_changed_is_named_wherever_its_score_is_shown(tmp_path, capsys):
    for method, digest in (("full", "new"), ("knorm", "new"), ("snapkv", "old"), ("random", None)):
        folder = write(tmp_path, method, range(40))
        (file,) = folder.glob(f"{method}-*/results.json")
        made = {"fingerprint": {"tasks": {"one": digest}}} if digest else {}
        file.write_text(json.dumps({**json.loads(file.read_text()), **made}))
    line = "one: its file or functions changed between the cells; not like the others: snapkv (0.5)"
    assert warnings(capsys, folder)[0] == [line]
    assert page_data(load_groups(folder))["groups"][0]["warning"] == line
    assert table([str(folder)]) == 0
    assert line in capsys.readouterr().out
    assert line in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            [{"device": "A100"}, {"device": "H100"}],
            "on different devices do not compare: of the cells 1 on A100, 1 on H100",
        ),
        (
            [{"processes": 1}, {"processes": 4}],
            "of different numbers of processes do not compare: of the cells 1 with 1, 1 with 4",
        ),
        (
            [{"versions": {"torch": "2.11", "numpy": "2.0"}}, {"versions": {"torch": "2.15", "numpy": "2.0"}}],
            "of different versions do not compare: of the cells 1 with torch 2.11, 1 with torch 2.15",
        ),
    ],
)
def test_times_made_in_different_ways_are_said_not_to_compare_wherever_they_are_shown(tmp_path, capsys, made, line):
    folder = write(tmp_path, "full", range(40))
    write(tmp_path, "snapkv", range(40))
    for cell, environment in zip(("full", "snapkv"), made, strict=True):
        (file,) = folder.glob(f"{cell}*/results.json")
        results = json.loads(file.read_text())
        timed = {**results["efficiency"], "ttft_s": {"median": 1.0}}
        file.write_text(json.dumps({**results, "efficiency": timed, "environment": environment}))
        assert bool(warnings(capsys, folder)[0]) == (cell == "snapkv")  # one that does not say, and one, are one
    line = f"one: times {line}"
    assert warnings(capsys, folder)[0] == [line]
    assert table([str(folder)]) == 0
    assert line in capsys.readouterr().out
    assert line in (folder / "report.md").read_text()


@pytest.mark.parametrize(("full", "is_weak"), [(23, True), (24, False)])
def test_a_full_cache_below_twice_the_blind_score_is_weak(tmp_path, capsys, full, is_weak):
    folder = write(tmp_path, "full", range(full))
    write(tmp_path, "blind", range(12))
    lines = warnings(capsys, folder)[0]
    assert [line for line in lines if "weak" in line] == is_weak * [
        "one: the full cache is weak: it scores 57.5, and blind 30.0; below 60.0, what a method loses is hard to tell "
        "from guessing"
    ]
    (shown,) = page_data(load_groups(folder))["groups"]
    assert shown["warning"] == "; ".join(lines)


@pytest.mark.parametrize(
    ("full", "targets", "is_weak"),
    [
        (19, TRUTH, True),
        (20, TRUTH, False),
        (2, "ab" * 4 + TRUTH[8:17] + "wxyz" * 5 + "123", False),
        (2, "z" * 40, False),
    ],
    ids=["below", "twice", "no target ten times", "no other target"],
)
def test_without_a_blind_run_the_commonest_target_is_what_guessing_scores(tmp_path, capsys, full, targets, is_weak):
    folder = write(tmp_path, "full", range(full), targets=targets)
    lines = warnings(capsys, folder)[0]
    assert len(lines) == is_weak
    assert all("and the commonest answer 25.0; below 50.0" in line for line in lines)


def test_from_a_third_on_twice_the_score_is_not_asked_for():
    assert [weak_below(base) for base in (0, 0.25, 0.5, 0.8)] == [0, 0.5, 0.75, pytest.approx(0.9)]
    assert weak_below(1 / 3) == pytest.approx(2 / 3)


def test_blind_has_no_curve_but_a_test(tmp_path, capsys):
    folder = write(tmp_path, "full", range(40))
    write(tmp_path, "blind", [3])
    write(tmp_path, "knorm", range(30))
    main([str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["series"] for row in found["curves"]] == ["knorm"]
    assert [row["series"] for row in found["tests"]] == ["blind", "knorm"]
