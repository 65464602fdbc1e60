"""Which method: chosen on one half of the questions, tested on the other; tables of answers are boards, too."""

import json

import numpy as np
import pytest

from lmms_eval_plugins.leaderboard.choice import best_methods, choose
from lmms_eval_plugins.leaderboard.command import main
from lmms_eval_plugins.leaderboard.tables import FILE, Entry, Table, Tables, board_of

QUESTIONS = 80
FULL = np.ones(QUESTIONS)
FIRST = np.arange(QUESTIONS) % 2 == 0  # the half on which methods are chosen


def wrong(count, half=None):
    """Scores with `count` wrong answers, in one half or in both alike."""
    scores = np.ones(QUESTIONS)
    for places in (np.flatnonzero(FIRST), np.flatnonzero(~FIRST)):
        if half is None or FIRST[places[0]] == half:
            scores[places[:count]] = 0
    return scores


def test_the_smallest_ratio_is_chosen_down_to_which_the_best_method_holds_on_other_questions():
    scores = {("a", 0.5): wrong(0), ("b", 0.5): wrong(1), ("c", 0.5): wrong(9)}
    scores |= {("a", 0.2): wrong(5), ("b", 0.2): wrong(0), ("c", 0.2): wrong(9)}
    scores |= {("a", 0.1): wrong(9), ("b", 0.1): wrong(8), ("c", 0.1): wrong(9)}
    found = choose(scores, FULL)
    assert (found.method, found.ratio, found.difference, found.questions, found.methods) == ("b", 0.2, 0.0, 40, 3)
    assert found.is_enough
    assert str(found).startswith("b at 0.2: 0.0 points [")


def test_a_method_that_is_only_good_where_it_was_chosen_does_not_pass():
    lucky = wrong(8, half=False)  # on the half where it is tested
    scores = {("lucky", 0.5): lucky, ("b", 0.5): wrong(2), ("c", 0.5): wrong(3)}
    found = choose(scores, FULL)
    assert (found.method, found.difference, found.is_enough) == ("lucky", -20.0, False)
    assert str(found).startswith("none: the best of 3 methods loses more, lucky at 0.5: -20.0 points [")


def test_points_are_those_of_the_scores_where_these_are_out_of_100():
    scores = {(name, 0.5): 100 * wrong(count) for name, count in {"a": 1, "b": 2, "c": 3}.items()}
    found = choose(scores, 100 * FULL)
    assert (found.method, found.difference) == ("a", -2.5)


def test_references_are_not_chosen_and_clusters_stay_whole():
    scores = {(name, 0.5): wrong(0) for name in ("hindsight", "full", "blind")}
    scores |= {(name, 0.5): wrong(count) for name, count in {"a": 1, "b": 2, "c": 3}.items()}
    assert choose(scores, FULL).method == "a"
    assert choose({**scores, ("hindsight by=output", 0.5): wrong(0)}, FULL) == choose(scores, FULL)
    of_pictures = np.repeat(np.arange(QUESTIONS // 4), 4)
    assert choose(scores, FULL, of_pictures).questions == QUESTIONS // 2
    assert choose(scores, FULL, np.zeros(QUESTIONS)) is None  # one picture has no other half


@pytest.mark.parametrize(("methods", "questions"), [(2, QUESTIONS), (3, 38)])
def test_of_too_few_methods_or_questions_nothing_is_chosen(methods, questions):
    scores = {(name, 0.5): wrong(1)[:questions] for name in "abc"[:methods]}
    assert choose(scores, FULL[:questions]) is None


def test_the_best_methods_are_those_with_the_best_mean_and_hindsight_is_the_last():
    scores = {(f"m{place}", ratio): wrong(place) for place in range(10) for ratio in (0.5, 0.2)}
    for hindsight in ("hindsight", "hindsight by=output"):
        known = {(hindsight, ratio): wrong(0) for ratio in (0.5, 0.2)}
        known |= {("blind", ratio): wrong(0) for ratio in (0.5, 0.2)}
        assert best_methods(scores | known) == [*(f"m{place}" for place in range(8)), hindsight]


def test_the_best_methods_are_found_without_a_ratio_that_all_have():
    scores = {("a", 0.5): wrong(2), ("b", 0.2): wrong(1), ("c", 0.1): wrong(3)}
    assert best_methods(scores) == ["b", "a", "c"]


def table(**changed):
    entries = [Entry(method="full", ratio=None, scores=FULL.tolist())]
    entries += [
        Entry(method=name, ratio=0.2, scores=wrong(count).tolist(), kept=0.21)
        for name, count in zip("abc", range(3), strict=True)
    ]
    facts = {"regime": "text", "task": "t", "model": "m", "protocol": {"scope": "prompt"}, "metric": "right"}
    facts |= {"command": "python -m x", "versions": {"torch": "2"}, "entries": entries}
    return Table(**{**facts, **changed})


def test_a_table_of_answers_is_a_board_with_its_choice():
    found = board_of(table(), "mine")
    assert [cell["method"] for cell in found["cells"]] == ["full", "a", "b", "c"]
    assert [cell["score"] for cell in found["cells"]] == [1.0, 1.0, 78 / 80, 76 / 80]
    assert found["cells"][2]["against"]["broken"] == 2
    assert found["cells"][2]["kept"] == "0.210"
    assert found["choice"]["text"].startswith("a at 0.2: 0.0 points")
    assert found["best"] == ["a", "b", "c"]
    assert found["protocol_text"] == "scope=prompt; 80 questions"
    without_full = board_of(table(entries=table().entries[1:]), "mine")
    assert (without_full["choice"], without_full["best"]) == (None, ["a", "b", "c"])


def test_a_submission_of_tables_alone_is_a_page(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / FILE).write_text(Tables(tables=[table()]).model_dump_json())
    assert main([str(tmp_path / "mine"), "--out", str(tmp_path / "a.html")]) == 0
    assert "(4 rows in 1 table, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entries": [{"method": "a", "ratio": 0.5, "scores": [1.5]}]}, "scores.0 Input should be less than or equal"),
        ({"entries": [{"method": "a", "ratio": 0.5, "scores": [float("nan")]}]}, "scores.0 Input should be"),
        ({"tables": 1}, "tables Input should be a valid array"),
        ({"clusters": ["a"]}, "all entries need the same questions, not [1, 80]"),
        ({"clusters": []}, "all entries need the same questions, not [0, 80]"),
        ({"regime": 1}, "tables.0.regime Input should be a valid string"),
    ],
)
def test_a_damaged_file_of_tables_is_one_line(tmp_path, capsys, change, message):
    content = json.loads(Tables(tables=[table()]).model_dump_json())
    content = change if "tables" in change else {"tables": [{**content["tables"][0], **change}]}
    (tmp_path / FILE).write_text(json.dumps(content))
    assert main([str(tmp_path), "--out", str(tmp_path / "a.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {str(tmp_path / FILE)!r} is no file of tables: ")
    assert message in line


def test_of_methods_equal_at_a_ratio_the_one_that_is_best_over_all_is_chosen():
    right, wrong = np.ones(100), np.zeros(100)
    scores = {(f"m{i}", ratio): right if ratio == 0.5 or i == 0 else wrong for i in range(9) for ratio in (0.5, 0.2)}
    assert choose(scores, right).method == "m0"
