"""Metrics of a grid: each against numbers worked by hand."""

import itertools
import json
import math

import numpy as np
import pytest

from kvcompress import KVCompressError
from lmms_eval_plugins import metrics
from lmms_eval_plugins.cells import results
from lmms_eval_plugins.cells.results import Cell

# -- arithmetic


def test_overall_performance_is_the_root_mean_square_of_the_shares():
    relative = metrics.relative_scores([30, 40], [50, 50])  # 0.6 and 0.8
    assert relative.tolist() == [0.6, 0.8]
    assert metrics.overall_performance(relative) == pytest.approx(math.sqrt((0.36 + 0.64) / 2))


def test_overall_performance_rewards_variance_and_generalisation_says_so():
    even, uneven = [0.5, 0.5], [0.0, 1.0]  # the same mean
    assert metrics.overall_performance(uneven) > metrics.overall_performance(even)
    assert metrics.overall_generalisation(even) == 0
    assert metrics.overall_generalisation(uneven) == pytest.approx(0.5 / 0.5)
    assert metrics.overall_generalisation([0.6, 0.8]) == pytest.approx(0.1 / 0.7)


def test_a_full_cache_that_scores_nothing_is_an_error():
    with pytest.raises(KVCompressError, match="the full cache scores 0"):
        metrics.relative_scores([1.0], [0.0])
    with pytest.raises(KVCompressError, match="all scores are 0"):
        metrics.overall_generalisation([0.0, 0.0])


def test_loyalty_counts_the_full_caches_answers_right_or_wrong():
    assert metrics.loyalty(["7", "cat", "no", ""], ["7", "dog", "no", ""]) == 0.75
    with pytest.raises(KVCompressError, match="not 1 with 2"):
        metrics.loyalty(["7"], ["7", "8"])


def test_speed_up_is_of_the_total_time():
    assert metrics.speed_up([1.0, 1.0], [1.0, 3.0]) == 2.0


def test_bootstrap_of_two_questions_is_what_all_four_resamples_say():
    # A is right on both, B on one: the resampled mean difference is 0, 1/2, 1/2 or 1, each with probability 1/4.
    found = metrics.paired_bootstrap([1, 1], [1, 0], resamples=40_000)
    assert (found.questions, found.difference, found.low, found.high) == (2, 0.5, 0.0, 1.0)
    assert found.p_value == pytest.approx(0.5, abs=0.02)  # 0 and 1 lie as far from 1/2 as that from 0


def test_bootstrap_agrees_with_all_resamples_of_five_questions():
    a, b = np.array([1, 1, 0, 1, 0.5]), np.array([0, 1, 0.3, 0, 0])
    means = np.array([np.mean(draw) for draw in itertools.product(a - b, repeat=5)])  # all 3125
    found = metrics.paired_bootstrap(a, b, resamples=40_000)
    exact = np.mean(np.abs(means - np.mean(a - b)) >= np.mean(a - b) - 1e-12)
    assert found.p_value == pytest.approx(exact, abs=0.01)
    assert [found.low, found.high] == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.05)


def test_bootstrap_is_seeded_antisymmetric_and_never_certain():
    a, b = [1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1, 0]
    found, other = metrics.paired_bootstrap(a, b, 999), metrics.paired_bootstrap(b, a, 999)
    assert found == metrics.paired_bootstrap(a, b, 999)
    assert found != metrics.paired_bootstrap(a, b, 999, seed=1)
    assert (other.difference, other.low, other.high) == pytest.approx((-found.difference, -found.high, -found.low))
    assert metrics.paired_bootstrap([1] * 5, [0] * 5, 999).p_value == 1 / 1000
    assert metrics.paired_bootstrap([1] * 5, [1] * 5, 999).p_value == 1.0
    with pytest.raises(KVCompressError, match="not 2 and 1"):
        metrics.paired_bootstrap([1, 1], [1])


def test_area_is_the_mean_over_a_logarithmic_axis():
    # 1/4, 1/2, 1 are evenly spaced: trapezoids of 0.5 to 0.9 and 0.9 to 1, of the same width.
    assert metrics.area_under_curve([0.5, 0.25], [0.9, 0.5], 0.25) == pytest.approx((0.7 + 0.95) / 2)
    assert metrics.area_under_curve([0.25, 0.5], [1, 1], 0.25) == pytest.approx(1)


def test_area_from_a_ratio_between_two_measured_ones_is_interpolated():
    # At 1/2, half-way between 1/4 and 1 on this axis, the line from 0.5 to 1 is at 0.75.
    assert metrics.area_under_curve([0.25], [0.5], 0.5) == pytest.approx((0.75 + 1) / 2)
    assert metrics.area_under_curve([0.1, 0.25, 1.0], [0, 0.5, 0.9], 0.25) == pytest.approx(0.7)  # full measured too


def test_area_below_the_smallest_measured_ratio_is_an_error():
    with pytest.raises(KVCompressError, match=r"from ratio 0.1 needs a score there; the smallest ratio is 0.25"):
        metrics.area_under_curve([0.25], [0.5], 0.1)
    with pytest.raises(KVCompressError, match="starts at a ratio"):
        metrics.area_under_curve([0.25], [0.5], 1.0)


def test_smallest_ratio_is_a_measured_one_above_which_all_are_good_enough():
    ratios, scores = [0.5, 0.2, 0.1, 0.05], [79.5, 79.0, 70.0, 79.9]
    assert metrics.smallest_ratio(ratios, scores, full=80, points=1) == 0.2  # 0.05 is luck: 0.1 is worse
    assert metrics.smallest_ratio(ratios, scores, full=80, points=0.5) == 0.5
    assert metrics.smallest_ratio(ratios, scores, full=80, points=0.1) == 1
    assert metrics.smallest_ratio(ratios, scores, full=80, points=20) == 0.05


# -- cells on disk


def write(
    root, task, method, ratio, answers, truth="abcd", seconds=1.0, tokens=2, options=None, settings=None, budget=None
):
    """A cell whose answers are the letters of `answers`; the first token takes `seconds`, each further half of that."""
    cell = Cell(task, "m", method, ratio, budget, options or {}, settings or {})
    scores = [float(answer == right) for answer, right in zip(answers, truth, strict=True)]
    protocol = {
        "task": task, "model": "m", "method": method, "ratio": ratio, "budget": budget,
        "settings": cell.settings, "changed_options": cell.options,
    }  # fmt: skip
    measured = {"ttft_s": seconds, "tpot_s": seconds / 2 if tokens > 1 else None, "tokens_out": tokens}
    samples = [
        {"task": task, "doc_id": n, "filtered_resps": [answer], "acc": score, "measurement": measured}
        for n, (answer, score) in enumerate(zip(answers, scores, strict=True))
    ]
    content = {
        "protocol": protocol,
        "results": {task: {"acc,none": sum(scores) / len(scores), "acc_stderr,none": 0.1}},
        "efficiency": {"realised_ratio": {"mean": ratio or 0.3}},
    }
    with results.new_cell(cell.folder(root)) as draft:
        results.write_cell(draft, content, samples)
    return cell.folder(root).parent


@pytest.fixture
def grid(tmp_path):
    """Two tasks; the full cache gets 4 of 4 and 2 of 4."""
    folder = write(tmp_path, "one", "full", 1.0, "abcd", seconds=2.0)
    write(tmp_path, "one", "knorm", 0.5, "abcx")
    write(tmp_path, "one", "knorm", 0.25, "abxx", seconds=0.5)
    write(tmp_path, "one", "snapkv", 0.25, "abcd")
    other = write(tmp_path, "two", "full", 1.0, "abxy", seconds=2.0)
    write(tmp_path, "two", "knorm", 0.25, "axxy", seconds=1.0)
    return [folder, other]


def command(capsys, *arguments):
    code = metrics.main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_cells_say_share_loyalty_and_speed_up(grid, capsys):
    _, text, _ = command(capsys, *grid, "--json")
    cells = {(cell["task"], cell["series"], cell["size"]): cell for cell in json.loads(text)["cells"]}
    cell = cells["two", "knorm", "0.25"]
    assert (cell["score"], cell["full"], cell["relative"]) == (0.25, 0.5, 0.5)
    assert cell["loyalty"] == 0.75  # "axxy" against "abxy", wrong answers included
    assert cell["speed_up"] == 2.0
    assert cells["one", "full", "1"]["loyalty"] == 1


def test_overall_metrics_are_over_the_tasks_that_have_the_cell(grid, capsys):
    _, text, _ = command(capsys, *grid, "--json")
    overall = {(row["series"], row["size"]): row for row in json.loads(text)["overall"]}
    row = overall["knorm", "0.25"]  # shares of full: 0.5 and 0.5
    assert (row["tasks"], row["op"], row["mean"], row["min"], row["og"]) == (["one", "two"], 0.5, 0.5, 0.5, 0)
    assert (row["ol"], row["ol_min"]) == ((0.5 + 0.75) / 2, 0.5)
    assert (row["oe"], row["oe_min"]) == (3, 2)
    assert overall["knorm", "0.5"]["tasks"] == ["one"]


def test_curves_of_a_task_begin_at_a_ratio_that_all_have(grid, capsys):
    _, text, _ = command(capsys, *grid, "--json", "--points", 25)
    curves = {(row["task"], row["series"]): row for row in json.loads(text)["curves"]}
    assert curves["one", "knorm"]["area"] == pytest.approx(((0.5 + 0.75) / 2 + (0.75 + 1) / 2) / 2)
    assert curves["one", "snapkv"]["area"] == 1
    assert [curves["one", name]["from"] for name in ("knorm", "snapkv")] == [0.25, 0.25]
    assert [curves["one", name]["smallest"] for name in ("knorm", "snapkv")] == [0.5, 0.25]


def test_seconds_are_of_the_first_token_and_each_further_one(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd", tokens=5)  # 1 + 4 / 2 seconds
    write(tmp_path, "one", "knorm", 0.5, "abcd", tokens=1)  # 1 second: there is no time per further token
    _, text, _ = command(capsys, folder, "--json")
    assert json.loads(text)["cells"][1]["speed_up"] == 3


def test_areas_of_a_task_are_over_the_ratios_that_all_methods_have(grid, tmp_path, capsys):
    write(tmp_path, "one", "h2o", 0.5, "abxx")
    _, text, _ = command(capsys, grid[0], "--json")
    curves = {row["series"]: row for row in json.loads(text)["curves"]}
    assert {row["from"] for row in curves.values()} == {0.5}
    assert curves["knorm"]["area"] == pytest.approx((0.75 + 1) / 2)
    assert curves["h2o"]["area"] == pytest.approx((0.5 + 1) / 2)


def test_an_area_that_begins_below_what_was_measured_is_left_open(grid, capsys):
    code, text, _ = command(capsys, *grid, "--json", "--from", 0.1)
    assert code == 0
    assert [row["area"] for row in json.loads(text)["curves"]] == [None] * 3


def test_compare_pairs_the_questions_at_each_common_ratio(grid, capsys):
    _, text, _ = command(capsys, grid[0], "--json", "--compare", "snapkv", "knorm")
    (row,) = json.loads(text)["compared"]
    assert (row["a"], row["b"], row["questions"], row["difference"]) == ("snapkv 0.25", "knorm 0.25", 4, 0.5)
    _, text, _ = command(capsys, grid[0], "--json", "--compare", "knorm", "full")
    assert [(row["a"], row["difference"]) for row in json.loads(text)["compared"]] == [
        ("knorm 0.5", -0.25), ("knorm 0.25", -0.5),
    ]  # fmt: skip


def test_tables_show_the_numbers(grid, capsys):
    code, text, _ = command(capsys, *grid, "--compare", "knorm", "full")
    assert code == 0
    for words in ("OP", "95 % interval", "smallest ratio within 1 points", "75.0 %", "4.00x", "-0.500"):
        assert words in text


def test_budgets_have_their_realised_ratio_on_the_axis(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd")
    write(tmp_path, "one", "knorm", None, "abxx", budget=64)
    _, text, _ = command(capsys, folder, "--json")
    read = json.loads(text)
    assert read["cells"][1]["size"] == "budget=64"
    assert read["curves"][0]["from"] == 0.3


def test_cells_of_other_settings_are_not_compared_and_what_is_left_out_is_said(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd")
    write(tmp_path, "one", "knorm", 0.5, "abcx")
    write(tmp_path, "one", "knorm", 0.5, "ab", truth="ab", settings={"limit": 2})
    code, text, error = command(capsys, folder, "--json")
    assert code == 0
    assert len(json.loads(text)["cells"]) == 2
    assert error.startswith("left out: one, m (limit=2): no cell of the full cache")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "snapkvv", "knorm"], "'snapkvv' is no series of one; there are: 'full', 'knorm', 'snapkv'"),
        (["--from", "1.5"], "starts at a ratio in (0, 1), not at 1.5"),
    ],
)
def test_bad_input_is_one_line_and_code_2(grid, capsys, arguments, message):
    code, _, error = command(capsys, grid[0], *arguments)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_method_with_two_series_has_to_be_named_in_full(grid, tmp_path, capsys):
    write(tmp_path, "one", "knorm", 0.5, "xxxx", options={"merge": "pivot"})
    code, _, error = command(capsys, grid[0], "--compare", "knorm", "snapkv")
    assert code == 0  # "knorm" is the name of a series
    write(tmp_path, "one", "snapkv", 0.25, "xxxx", options={"window_size": 8})
    write(tmp_path, "one", "h2o", 0.25, "xxxx", options={"recent": 0.1})
    write(tmp_path, "one", "h2o", 0.25, "xxxx", options={"recent": 0.2})
    code, _, error = command(capsys, grid[0], "--compare", "h2o", "snapkv")
    assert (code, "'h2o' names several series of one" in error) == (2, True)


@pytest.mark.parametrize("missing", ["folder", "full"])
def test_no_cells_or_no_full_cache_is_an_error(tmp_path, capsys, missing):
    folder = tmp_path / "one" / "m" if missing == "folder" else write(tmp_path, "one", "knorm", 0.5, "abcd")
    code, _, error = command(capsys, folder)
    assert code == 2
    assert {"folder": "no finished cell under", "full": "run the same command with METHOD full"}[missing] in error


def test_other_questions_than_the_full_caches_are_an_error(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd")
    write(tmp_path, "one", "knorm", 0.5, "abc", truth="abc")
    code, _, error = command(capsys, folder)
    assert (code, "answered other questions than the full cache" in error) == (2, True)


def test_a_metric_without_a_number_per_question_cannot_be_paired(grid, tmp_path, capsys):
    folder = grid[0]
    for file in folder.glob("*/samples.jsonl"):
        file.write_text(file.read_text().replace('"acc": 1.0', '"acc": {"question_id": 3}'))
    code, _, error = command(capsys, folder, "--compare", "snapkv", "knorm")
    assert (code, "one: acc is no number per question" in error) == (2, True)
    assert command(capsys, folder)[0] == 0  # loyalty and the rest need none
