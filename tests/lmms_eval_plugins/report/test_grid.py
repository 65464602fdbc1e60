"""The metrics of a grid on disk, from the command line: against numbers worked by hand."""

import json
import re
from pathlib import Path

import pytest

from lmms_eval_plugins.report.metrics_command import main
from tests.support.result_cells import write_answers as write

DOCS = Path(__file__).parents[3] / "docs"


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
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def found(capsys, *arguments):
    """What `--json` writes."""
    code, text, _ = command(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(text)


def test_cells_say_share_loyalty_and_speed_up(grid, capsys):
    cells = {(cell["task"], cell["series"], cell["size"]): cell for cell in found(capsys, *grid)["cells"]}
    cell = cells["two", "knorm", "0.25"]
    assert (cell["score"], cell["full"], cell["relative"]) == (0.25, 0.5, 0.5)
    assert cell["loyalty"] == 0.75  # "axxy" against "abxy", wrong answers included
    assert cell["speed_up"] == 2.0
    assert cells["one", "full", "1"]["loyalty"] == 1


def test_a_folder_that_is_given_twice_counts_once(grid, capsys):
    assert found(capsys, *grid, grid[0]) == found(capsys, *grid)


def test_headroom_stands_where_random_and_hindsight_have_the_same_ratio(grid, capsys):
    for ratio, answers in ((0.25, "axxx"), (0.5, "axxx")):
        write(grid[0].parents[1], "one", "random", ratio, answers)
    assert "headroom" not in command(capsys, grid[0])[1]
    write(grid[0].parents[1], "one", "hindsight", 0.25, "abcx")
    parts = {(cell["series"], cell["size"]): cell["headroom"] for cell in found(capsys, grid[0])["cells"]}
    assert parts["knorm", "0.25"] == 0.5
    assert parts["snapkv", "0.25"] == 1.5
    assert parts["hindsight", "0.25"] == 1
    assert parts["random", "0.25"] == 0
    assert parts["knorm", "0.5"] is parts["full", "1"] is None
    assert "50 [" in re.search(r"knorm.*0\.25.*", command(capsys, grid[0])[1])[0]


def test_ratios_that_six_digits_do_not_tell_apart_are_compared_each_with_its_own(tmp_path, capsys):
    for method in ("full", "knorm", "snapkv"):
        for ratio in (0.1234567, 0.1234568):
            folder = write(tmp_path, "one", method, 1.0 if method == "full" else ratio, "abcd")
    compared = found(capsys, folder, "--compare", "knorm", "snapkv")["compared"]
    assert [row["a"] for row in compared] == ["knorm 0.1234568", "knorm 0.1234567"]


def test_overall_metrics_are_over_the_tasks_that_have_the_cell(grid, capsys):
    overall = {(row["series"], row["size"]): row for row in found(capsys, *grid)["overall"]}
    row = overall["knorm", "0.25"]  # shares of full: 0.5 and 0.5
    assert (row["tasks"], row["op"], row["mean"], row["min"], row["og"]) == (["one", "two"], 0.5, 0.5, 0.5, 0)
    assert (row["ol"], row["ol_min"]) == ((0.5 + 0.75) / 2, 0.5)
    assert (row["oe"], row["oe_min"]) == (3, 2)
    assert overall["knorm", "0.5"]["tasks"] == ["one"]


def test_curves_of_a_task_begin_at_a_ratio_that_all_have(grid, capsys):
    curves = {(row["task"], row["series"]): row for row in found(capsys, *grid, "--points", 25)["curves"]}
    assert curves["one", "knorm"]["area"] == pytest.approx(((0.5 + 0.75) / 2 + (0.75 + 1) / 2) / 2)
    assert curves["one", "snapkv"]["area"] == 1
    assert [curves["one", name]["from"] for name in ("knorm", "snapkv")] == [0.25, 0.25]
    assert [curves["one", name]["smallest"] for name in ("knorm", "snapkv")] == [0.5, 0.25]


def test_seconds_are_of_the_first_token_and_each_further_one(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd", tokens=5)  # 1 + 4 / 2 seconds
    write(tmp_path, "one", "knorm", 0.5, "abcd", tokens=1)  # 1 second: there is no time per further token
    assert found(capsys, folder)["cells"][1]["speed_up"] == 3


def test_answers_that_were_not_timed_have_no_speed_up(grid, capsys):
    """Those of a server."""
    for file in grid[0].parents[1].glob("*/m/knorm-0.25/samples.jsonl"):
        file.write_text(re.sub(r'"ttft_s": [\d.]+', '"ttft_s": null', file.read_text()))
    _, text, _ = command(capsys, *grid)
    assert "NaN" not in text
    assert re.search(r"knorm +│ +0\.250 .*│ +- │", text)


def test_areas_of_a_task_are_over_the_ratios_that_all_methods_have(grid, tmp_path, capsys):
    write(tmp_path, "one", "h2o", 0.5, "abxx")
    curves = {row["series"]: row for row in found(capsys, grid[0])["curves"]}
    assert {row["from"] for row in curves.values()} == {0.5}
    assert curves["knorm"]["area"] == pytest.approx((0.75 + 1) / 2)
    assert curves["h2o"]["area"] == pytest.approx((0.5 + 1) / 2)


def test_an_area_that_begins_below_what_was_measured_is_left_open(grid, capsys):
    code, text, _ = command(capsys, *grid, "--json", "--from", 0.1)
    assert code == 0
    assert [row["area"] for row in json.loads(text)["curves"]] == [None] * 3


def test_compare_pairs_the_questions_at_each_common_ratio(grid, capsys):
    (row,) = found(capsys, grid[0], "--compare", "snapkv", "knorm")["compared"]
    assert (row["a"], row["b"], row["questions"], row["difference"]) == ("snapkv 0.25", "knorm 0.25", 4, 50)
    compared = found(capsys, grid[0], "--compare", "knorm", "full")["compared"]
    assert [(row["a"], row["difference"]) for row in compared] == [("knorm 0.5", -25), ("knorm 0.25", -50)]


def test_tables_show_the_numbers(grid, capsys):
    code, text, _ = command(capsys, *grid, "--compare", "knorm", "full")
    assert code == 0
    for words in ("OP", "95 % interval", "smallest share within 1 point ", "75.0 %", "4.00x", "-50.0"):
        assert words in text


def test_the_table_over_all_tasks_has_the_metrics_that_are_documented(grid, capsys):
    documented = re.findall(r"^\| (O\w), ", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    text = command(capsys, *grid)[1]
    header = next(line for line in text.splitlines() if " OP " in line and "mean" in line)
    names = [name.strip() for name in re.split(r"[┃│]", header) if name.strip()]
    assert [name for name in names if name.startswith("O")] == documented == ["OP", "OG", "OL", "OE"]
    assert names[:4] == ["model", "method", "kept (asked)", "tasks"]


def test_what_keeps_more_than_was_asked_is_compared_at_what_it_keeps(grid, capsys):
    root = grid[0].parents[1]
    for name in ("random", "hindsight"):
        write(root, "one", name, 0.25, "axxx" if name == "random" else "abcd")
    write(root, "one", "fastv", 0.25, "abcx", realised=0.499)
    read = found(capsys, grid[0], "--compare", "fastv", "knorm")
    cell = next(cell for cell in read["cells"] if cell["series"] == "fastv")
    assert (cell["kept"], cell["size"], cell["headroom"]) == (0.499, "0.25", None)  # random and hindsight keep 0.25
    curves = {row["series"]: row for row in read["curves"]}
    assert curves["knorm"]["from"] == 0.25  # fastv has no say in where the areas begin
    assert curves["fastv"]["area"] is None
    assert [(row["a"], row["b"]) for row in read["compared"]] == [("fastv 0.25 (kept 0.499)", "knorm 0.25")]
    assert re.search(r"fastv +│ +0\.499 \(0\.25\)", command(capsys, grid[0])[1])


def test_budgets_have_their_realised_ratio_on_the_axis(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd")
    write(tmp_path, "one", "knorm", None, "abxx", budget=64)
    read = found(capsys, folder)
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


def test_a_task_on_which_the_full_cache_scores_nothing_is_left_out_and_named(grid, tmp_path, capsys):
    nothing = write(tmp_path, "three", "full", 1.0, "xxxx")
    write(tmp_path, "three", "knorm", 0.5, "axxx")
    line = "three, m: the full cache scores 0: a share of that is meaningless\n"
    code, text, error = command(capsys, *grid, nothing)
    assert (code, error) == (0, f"left out: {line}")
    assert text == command(capsys, *grid)[1]
    assert command(capsys, nothing) == (2, "", f"error: {line}")


def test_a_method_with_two_series_has_to_be_named_in_full(grid, tmp_path, capsys):
    write(tmp_path, "one", "knorm", 0.5, "xxxx", options={"merge": "pivot"})
    code, _, error = command(capsys, grid[0], "--compare", "knorm", "snapkv")
    assert code == 0  # "knorm" is the name of a series
    write(tmp_path, "one", "snapkv", 0.25, "xxxx", options={"window_size": 8})
    write(tmp_path, "one", "h2o", 0.25, "xxxx", options={"recent": 0.1})
    write(tmp_path, "one", "h2o", 0.25, "xxxx", options={"recent": 0.2})
    code, _, error = command(capsys, grid[0], "--compare", "h2o", "snapkv")
    assert (code, "'h2o' names several series of one" in error) == (2, True)


def test_cells_of_other_questions_are_compared_on_the_common_ones_and_say_how_many(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abxd", seconds=2.0)
    write(tmp_path, "one", "knorm", 0.5, "axc", truth="abc")
    read = found(capsys, folder)
    cell, (test,) = read["cells"][1], read["tests"]
    assert (cell["relative"], cell["loyalty"], cell["speed_up"]) == (pytest.approx(1), pytest.approx(1 / 3), 2)
    assert (test["questions"], test["difference"], test["broken"], test["mended"]) == (3, 0, 1, 1)
    write(tmp_path, "one", "knorm", 0.25, "abcdx", truth="abcde")
    tables = command(capsys, folder)[1]
    assert re.search(r"knorm +│ +0\.250 │ +4 of 5 │", tables)
    assert re.search(r"knorm +│ +0\.500 │ +3 │", tables)


def test_a_cell_without_a_common_question_is_an_error(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd")
    samples = write(tmp_path, "one", "knorm", 0.5, "abcd") / "knorm-0.5" / "samples.jsonl"
    samples.write_text(re.sub(r'"doc_id": (\d)', r'"doc_id": 1\1', samples.read_text()))
    code, _, error = command(capsys, folder)
    assert (code, "knorm at 0.5 shares no question with the full cache" in error) == (2, True)


TRUTH = "abcdefghijklmnopqrst"


def write_turned(root, method, ratio, broken, **more):
    """A cell that has the first `broken` of 20 questions wrong."""
    return write(root, "long", method, ratio, "-" * broken + TRUTH[broken:], truth=TRUTH, **more)


def test_every_method_is_tested_against_the_full_cache_and_a_reference_with_holms_correction(tmp_path, capsys):
    folder = write_turned(tmp_path, "full", 1.0, 1)
    for method, broken in (("snapkv", 9), ("knorm", 6), ("random", 1)):
        write_turned(tmp_path, method, 0.2, broken, tokens=3)
        write_turned(tmp_path, method, 0.1, 9)
    tests = {(test["a"], test["b"]): test for test in found(capsys, folder, "--reference", "random")["tests"]}
    of_full = [a for a, b in tests if b == "full 1"]
    assert sorted(of_full) == [f"{method} {size}" for method in ("knorm", "random", "snapkv") for size in (0.1, 0.2)]
    test = tests["snapkv 0.2", "full 1"]
    assert (test["difference"], test["broken"], test["mended"]) == (-40, 8, 0)
    assert (test["tokens_out"], test["reference_tokens_out"]) == (3, 2)
    # Eight answers turned in four of six tests: 2 / 2**8, times six.
    assert (test["p_value"], test["holm"]) == (2**-7, pytest.approx(6 * 2**-7))
    assert tests["random 0.2", "full 1"]["holm"] == 1
    of_random = {a: test for (a, b), test in tests.items() if b.startswith("random")}
    assert sorted(of_random) == ["knorm 0.1", "knorm 0.2", "snapkv 0.1", "snapkv 0.2"]
    assert of_random["snapkv 0.2"]["holm"] == pytest.approx(4 * 2**-7)
    assert of_random["snapkv 0.1"]["difference"] == 0
    assert "long, m against random" in command(capsys, folder, "--reference", "random")[1]


def test_a_method_is_not_worse_if_its_interval_lies_above_the_margin(tmp_path, capsys):
    folder = write_turned(tmp_path, "full", 1.0, 0)
    write_turned(tmp_path, "knorm", 0.5, 0)
    (test,) = found(capsys, folder)["tests"]
    assert test["not_worse"] == 0  # 20 equal answers show little
    for margin, is_shown in ((-test["low"] - 0.1, False), (-test["low"] + 0.1, True)):
        (test,) = found(capsys, folder, "--margin", margin)["tests"]
        assert test["not_worse"] == is_shown
        assert ("not shown" in command(capsys, folder, "--margin", margin)[1]) != is_shown
    assert "not worse by 2 " in command(capsys, folder)[1]


def test_power_says_what_so_many_questions_find(tmp_path, capsys):
    folder = write_turned(tmp_path, "full", 1.0, 0)
    write_turned(tmp_path, "knorm", 0.5, 12)
    (test,) = found(capsys, folder, "--margin", 10)["tests"]
    assert test["detects"] == pytest.approx(2.8016 * test["deviation"] / 20**0.5, rel=1e-4)
    assert test["needed"] == pytest.approx(20 * (test["detects"] / 10) ** 2, abs=1)
    assert "questions for 10" not in command(capsys, folder, "--margin", 10)[1]
    assert "questions for 10" in command(capsys, folder, "--margin", 10, "--power")[1]


def test_questions_about_one_picture_or_document_are_not_independent(tmp_path, capsys):
    """By the recorded pictures, by the field that the task names, and by one that is asked for."""
    documents = [{"page": n // 5} for n in range(20)]
    folder = write_turned(tmp_path, "full", 1.0, 0, docs=documents)
    write_turned(tmp_path, "knorm", 0.5, 12, docs=documents)

    def clusters(*more):
        tests = found(capsys, folder, *more)["tests"]
        return [test["clusters"] for test in tests]

    assert clusters() == [20]
    assert clusters("--cluster", "page") == [4]
    assert "4 clusters" in command(capsys, folder, "--cluster", "page")[1]
    for file in folder.glob("*/samples.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for n, line in enumerate(lines):
            line["measurement"]["shows"] = f"{n % 10}" if n < 15 else ""
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert clusters() == [15]  # ten pictures, and five questions without one
    for file in folder.glob("*/results.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "configs": {"long": {"cluster_key": "page"}}}))
    assert clusters() == [4]
    assert clusters("--cluster", "doc_id") == [20]
    code, _, error = command(capsys, folder, "--cluster", "videoID")
    assert code == 2
    assert error == "error: --cluster videoID: question 0 of 'long' has no such field, but doc_id, page\n"


def test_the_field_of_lmms_evals_cluster_key_may_be_in_the_score(tmp_path, capsys):
    folder = write_turned(tmp_path, "full", 1.0, 0, nested=True)
    write_turned(tmp_path, "knorm", 0.5, 12, nested=True)
    for file in folder.glob("*/results.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "configs": {"long": {"cluster_key": "videoID"}}}))
    (test,) = found(capsys, folder)["tests"]
    assert test["clusters"] == 1
    assert test["p_value"] == 1  # all questions are about one video


def test_a_metric_without_a_number_per_question_cannot_be_paired(grid, tmp_path, capsys):
    folder = grid[0]
    for file in folder.glob("*/samples.jsonl"):
        file.write_text(file.read_text().replace('"acc": 1.0', '"acc": {"question_id": 3}'))
    code, _, error = command(capsys, folder, "--compare", "snapkv", "knorm")
    assert (code, "one: acc has no score per question" in error) == (2, True)
    assert command(capsys, folder)[0] == 0  # loyalty and the rest need none


def test_scores_that_lie_among_other_things_are_compared(tmp_path, capsys):
    write(tmp_path, "video", "full", 1.0, "abcd", nested=True)
    folder = write(tmp_path, "video", "knorm", 0.5, "abxx", nested=True)
    code, text, _ = command(capsys, folder, "--compare", "full", "knorm", "--json")
    assert code == 0
    assert json.loads(text)["compared"][0]["difference"] == 50
