"""Draws of one method are one row: the mean, and the spread of their scores."""

import json

import numpy as np
import pytest

from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.results import load_cells
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.report.draws import pooled
from lmms_eval_plugins.report.grid import load_grid, paired_tests
from lmms_eval_plugins.report.groups import load_groups
from lmms_eval_plugins.report.html.data import page_data
from lmms_eval_plugins.report.html.tables import markdown_group
from lmms_eval_plugins.report.metrics_command import main
from lmms_eval_plugins.report.table import markdown, sweep_frame
from tests.support.result_cells import write_answers as write

DRAWS = ("axxx", "abxx", "abcx")  # right: 1, 2 and 3 of 4


@pytest.fixture
def folder(tmp_path):
    found = write(tmp_path, "one", "full", 1.0, "abcd")
    for seed, answers in enumerate(DRAWS):
        for ratio in (0.5, 0.25):
            write(tmp_path, "one", "random", ratio, answers, options={"seed": seed} if seed else {})
    write(tmp_path, "one", "random", 0.5, "abcd", options={"seed": 1, "window_size": 4})
    write(tmp_path, "one", "knorm", 0.5, "abcd")
    return found


def test_a_table_has_a_row_per_size_with_mean_and_spread(folder):
    frame = pooled(sweep_frame(load_cells(folder)))
    rows = {(row.series, row.ratio): row for row in frame.itertuples()}
    assert set(rows) == {
        ("full", 1.0),
        ("knorm", 0.5),
        ("random draws=3", 0.5),
        ("random draws=3", 0.25),
        ("random seed=1 window_size=4", 0.5),
    }
    row = rows["random draws=3", 0.25]
    assert (row.score, row.stderr, row.draws) == (0.5, np.std([0.25, 0.5, 0.75], ddof=1), 3)
    text = markdown(frame, "one")
    assert "| random draws=3 | 0.250 | 50.0 ± 25.0 |" in text
    assert "draws=N: mean of N seeds" in text
    assert "draws=N" not in markdown(sweep_frame(load_cells(folder)), "one")


def test_a_copy_of_a_cell_is_no_draw(tmp_path):
    folder = write(tmp_path, "one", "random", 0.5, "abxx")
    frame = sweep_frame(load_cells(folder) * 2)
    assert pooled(frame)["series"].tolist() == ["random", "random"]


def test_metrics_take_the_mean_over_draws_of_every_question(folder, capsys, tmp_path):
    write(tmp_path, "one", "hindsight", 0.5, "abcd")
    write(tmp_path, "one", "snapkv", 0.5, "abcx")
    assert main([str(folder), "--json", "--compare", "random draws=3", "full"]) == 0
    found = json.loads(capsys.readouterr().out)
    cells = {(cell["series"], cell["size"]): cell for cell in found["cells"]}
    cell = cells["random draws=3", "0.5"]
    assert [cell[name] for name in ("draws", "score", "relative", "loyalty", "stderr")] == [3, 0.5, 0.5, 0.5, 0.25]
    tests = {row["a"]: row for row in found["compared"]}
    assert set(tests) == {"random draws=3 0.5", "random draws=3 0.25"}
    assert tests["random draws=3 0.5"]["difference"] == -50
    assert tests["random draws=3 0.5"]["broken"] == 2  # on average right in less than half of the draws


def test_headroom_is_measured_from_the_mean_of_the_draws(tmp_path, capsys):
    folder = write(tmp_path, "one", "full", 1.0, "abcd")
    for seed, answers in enumerate(DRAWS):
        write(tmp_path, "one", "random", 0.5, answers, options={"seed": seed} if seed else {})
    write(tmp_path, "one", "hindsight", 0.5, "abcd")
    write(tmp_path, "one", "snapkv", 0.5, "abcx")
    main([str(folder), "--json"])
    cells = {cell["series"]: cell for cell in json.loads(capsys.readouterr().out)["cells"]}
    assert cells["snapkv"]["headroom"] == pytest.approx(0.5)
    assert cells["random draws=3"]["headroom"] == 0


def test_the_reports_tables_and_tests_have_one_row_for_the_draws(folder):
    (group,) = load_groups(folder)
    text = markdown_group(group)
    assert text.count("random draws=3") == 2 + 1 + 2  # cells, scores by size, tests
    assert len(group.frame) == len(load_cells(folder))


def test_the_reports_page_has_one_cell_for_the_draws(folder, tmp_path):
    write(tmp_path, "one", "hindsight", 0.25, "abcd")
    groups = load_groups(folder)
    (group,) = page_data(groups)["groups"]
    cells = {(cell["series"], cell["ratio"]): (place, cell) for place, cell in enumerate(group["cells"])}
    assert len(cells) == len(group["cells"]) == 6
    place, cell = cells["random draws=3", 0.5]
    assert [cell[name] for name in ("score", "stderr", "same")] == [0.5, 0.25, 0.5]
    tests = paired_tests(load_grid([folder])[0])
    (test,) = tests[tests["a"] == "random draws=3 0.5"].itertuples()
    assert cell["against"]["holm"] == test.holm
    assert cells["random draws=3", 0.25][1]["headroom"] == [0, 0, 0]
    question = group["questions"][1]
    assert (question["a"][place], question["s"][place]) == ("x", pytest.approx(2 / 3))  # of the first draw; the mean
    assert "draws=N" in group["draws"]


def test_a_range_of_seeds_is_a_cell_each_of_the_methods_that_draw():
    plan = Plan.of(parse(["tiny_textvqa", "tiny", "full,random,snapkv", "0.5,0.2", "seed=0..2"]))
    found = [(cell.method, cell.ratio, cell.options, options.get("seed")) for cell, options in plan.cells]
    assert found == [
        ("full", 1.0, {}, None),
        *(("random", ratio, {"seed": seed} if seed else {}, seed) for seed in range(3) for ratio in (0.5, 0.2)),
        *(("snapkv", ratio, {}, None) for ratio in (0.5, 0.2)),
    ]
