"""Which number represents a cell, and over which questions."""

import math

import pytest

from lmms_eval_plugins.leaderboard.boards import leaderboard, rows_of
from lmms_eval_plugins.report.against import against_full
from lmms_eval_plugins.report.groups import load_groups
from lmms_eval_plugins.report.headline import by_question, headline
from lmms_eval_plugins.report.heatmap_command import main as heatmap
from lmms_eval_plugins.report.metrics_command import main as metrics
from lmms_eval_plugins.report.table import best_of_sizes
from lmms_eval_plugins.report.table_command import main as table
from tests.support.result_cells import write_answers


def cell(scores, questions=None, task="t", **more):
    results = scores if task in scores else {task: scores}
    return {"protocol": {"task": task}, "results": results, "metric_questions": questions or {}, **more}


@pytest.mark.parametrize(
    ("scores", "questions", "expected"),
    [
        ({"Bleu_4,none": 0.1, "CIDEr,none": 0.9}, {}, "CIDEr"),
        ({"relaxed_human,none": 0.1, "relaxed_overall,none": 0.2}, {}, "relaxed_overall"),
        ({"seed_video,none": 0.1, "seed_all,none": 0.2}, {"seed_video,none": 2, "seed_all,none": 6}, "seed_all"),
        ({"cognition,none": 9.0, "perception,none": 1.0}, {"cognition,none": 2, "perception,none": 5}, "perception"),
        ({"acc,none": 0.1, "f1,none": 0.2}, {}, "acc"),
        ({"submission,none": None, "acc,none": 1}, {}, "acc"),
        ({"submission,none": 0.5, "acc,none": 1}, {}, "acc"),
        ({"acc,none": 0.1, "f1,none": 0.2}, {"f1,none": 1}, "f1"),
        ({"acc_stderr,none": 0.1, "acc_stderr_clt,none": 0.1, "acc,none": 1}, {}, "acc"),
        ({"acc_expected_accuracy,none": 0.3, "acc_consistency_rate,none": 0.3, "acc,none": 1}, {}, "acc"),
        ({"acc,none": "N/A", "bypass,none": 999}, {}, None),
        ({"acc,none": math.nan}, {}, None),
    ],
)  # fmt: skip
def test_the_main_metric_is_the_total_over_most_questions(scores, questions, expected):
    found = headline(cell(scores, {"t": questions}))
    assert (found and found.metric) == expected


def test_a_metric_or_filter_that_is_not_there_is_named_with_those_that_are(tmp_path, capsys):
    folder = write_answers(tmp_path, "one", "full", 1.0, "abcd")
    said = "no score by --metric anls --filter strict, only by acc"
    asked = [str(folder), "--metric", "anls", "--filter", "strict"]
    assert table(asked) == 0
    assert f"one, m: {said}" in capsys.readouterr().out
    assert metrics(asked) == 2
    assert capsys.readouterr().err.endswith(f"{said}\n")
    assert heatmap(asked) == 1
    assert f"it has {said}" in capsys.readouterr().err
    assert metrics([str(folder)]) == 0
    file = folder / "full-1" / "results.json"
    file.write_text(file.read_text().replace('"acc,none"', '"bypass,none"'))
    capsys.readouterr()
    assert metrics(asked) == 2
    assert capsys.readouterr().err.endswith("full-1 has no score (was it run with --predict_only?)\n")


def test_the_first_in_the_tasks_list_is_taken_not_the_first_that_a_question_returned():
    scores = {"f1,none": 0.2, "acc,none": 0.1}
    listed = {"t": {"metric_list": [{"metric": "acc"}, {"metric": "f1"}]}}
    assert headline(cell(scores, configs=listed)).metric == "acc"


def test_a_metric_of_which_less_is_better_says_so_and_its_lowest_score_is_the_best(tmp_path, capsys):
    for method, ratio, answers in (("full", 1.0, "abcd"), ("knorm", 0.5, "abxx"), ("snapkv", 0.5, "abcx")):
        folder = write_answers(tmp_path, "one", method, ratio, answers, is_lower_better=True)
    (group,) = load_groups(tmp_path)
    assert set(group.frame["metric"]) == {"acc (lower is better)"}
    best = group.frame[best_of_sizes(group.frame, 100)]
    assert best["method"].tolist() == ["knorm"], "it has the fewest points"
    (board,) = leaderboard(rows_of("mine", [group]))["boards"]
    assert [cell["method"] for cell in board["cells"]] == ["full", "knorm", "snapkv"]
    assert not board["best"]
    assert against_full(group.frame)["difference"].isna().all()
    assert metrics([str(folder)]) == 2
    assert "acc (lower is better), but what is lost here is of scores" in capsys.readouterr().err


def test_metric_and_filter_can_be_chosen():
    scores = {"acc,strict": 0.1, "acc_stderr,strict": 0.01, "acc,loose": 0.2, "f1,strict": 0.3, "f1,loose": 0.4}
    assert headline(cell(scores), "f1").score == 0.3
    assert headline(cell(scores), metric_filter="loose").score == 0.2
    found = headline(cell(scores), "f1", "loose")
    assert (found.score, found.stderr, found.name) == (0.4, None, "f1 (loose)")
    assert headline(cell(scores)).stderr == 0.01
    assert headline(cell(scores), "bleu") is None


GROUP = {
    "g": {"alias": "g", " ": " "},
    "a": {"acc,none": 0.5, "acc_stderr,none": 0.3, "own_all,none": 0.9},
    "b": {"acc,none": 1.0, "acc_stderr,none": 0.1},
    "c": {"submission,none": None},
}


def test_a_group_has_the_mean_over_the_questions_of_its_tasks():
    questions = {"a": {"acc,none": 3, "own_all,none": 3}, "b": {"acc,none": 1}}
    subtasks = {"g": ["a", "inner"], "inner": ["b", "c"]}
    found = headline(cell(GROUP, questions, "g", group_subtasks=subtasks))
    assert (found.metric, found.score, found.questions, found.tasks) == ("acc", (3 * 0.5 + 1.0) / 4, 4, ("a", "b"))
    assert found.stderr == pytest.approx(math.sqrt((3 * 0.3) ** 2 + 0.1**2) / 4)
    own = {**GROUP, "g": {"acc,none": 0.7}}
    assert headline(cell(own, questions, "g", group_subtasks=subtasks)).score == 0.7


@pytest.mark.parametrize("names", [("pairs", "single"), ("single", "pairs")])
def test_a_groups_own_metrics_have_the_order_and_the_direction_that_its_tasks_list(names):
    """lmms-eval writes a group's in any order."""
    listed = {"a": {"metric_list": [{"metric": "single", "higher_is_better": False}, {"metric": "pairs"}]}}
    scores = {"g": {f"{name},none": 0.5 for name in names}, "a": {}}
    found = headline(cell(scores, {}, "g", group_subtasks={"g": ["a"]}, configs=listed))
    assert (found.metric, found.is_lower_better) == ("single", True)
    unlisted = headline(cell(scores, {}, "g", group_subtasks={"g": ["a"]}))
    assert unlisted.metric == "pairs"


def test_a_group_whose_tasks_share_no_metric_has_none():
    scores = {"g": {}, "a": {"acc,none": 0.5}, "b": {"sum,none": 1500.0}}
    assert headline(cell(scores, {}, "g", group_subtasks={"g": ["a", "b"]})) is None


def test_a_question_has_the_line_of_the_headlines_filter_and_a_nested_score_counts():
    found = headline(cell({"acc,strict": 0.1, "acc,loose": 0.2}), metric_filter="loose")
    lines = [{"task": "t", "doc_id": 0, "filter": name, "acc": value} for name, value in (("strict", 0), ("loose", 1))]
    assert [(line["filter"], score) for line, score in by_question(cell({}), lines, found)] == [("loose", 1.0)]
    nested = [{"task": "t", "doc_id": 0, "filter": "loose", "acc": {"score": 0.5, "correct": True}}]
    assert by_question(cell({}), nested, found)[0][1] == 0.5
    keyed = cell({}, configs={"t": {"score_key": "correct"}})
    assert by_question(keyed, nested, found)[0][1] == 1.0
    assert math.isnan(by_question(cell({}), [{**nested[0], "acc": {"pred": "A"}}], found)[0][1])
