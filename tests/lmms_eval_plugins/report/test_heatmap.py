"""The heat map says what the cells' questions say."""

import json

import pandas as pd
import pytest

from lmms_eval_plugins.report import heatmap
from lmms_eval_plugins.report.heatmap_command import main
from tests.support.result_cells import write_answers

# Two lengths at two depths, twice each, and a question without a depth.
DOCS = [
    {"length": length, "depth": depth, "kind": kind, "texts": ["not a column"]}
    for kind in ("image", "text")
    for length in (4, 16)
    for depth in (0.0, 1.0)
] + [{"length": 16, "depth": None, "kind": "image", "texts": []}]
TRUTH = "abcdabcda"


@pytest.fixture
def folder(tmp_path):
    write_answers(tmp_path, "long_needle", "full", 1.0, TRUTH, TRUTH, docs=DOCS)
    write_answers(tmp_path, "long_needle", "snapkv", 0.5, "xbcdxbcda", TRUTH, docs=DOCS)
    return write_answers(tmp_path, "long_needle", "snapkv", 0.2, "xbxdabxdx", TRUTH, docs=DOCS)


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn; a figure takes long."""
    found = []
    monkeypatch.setattr(heatmap, "draw", lambda table, *others: (found.append(table), others[-1].touch()))
    return found


def scores(table, series, size):
    own = table[(table["series"] == series) & (table["size"] == size)]
    return {(row.length, row.depth): (row.score, row.questions) for row in own.itertuples()}


def test_each_cell_has_the_mean_of_its_questions_at_each_length_and_depth(folder, drawn, capsys):
    assert main([str(folder)]) == 0
    (table,) = drawn
    assert scores(table, "full", "1") == {(n, d): (1.0, 2) for n in (4, 16) for d in (0.0, 1.0)}
    assert scores(table, "snapkv", "0.5") == {(4, 0.0): (0, 2), (4, 1.0): (1, 2), (16, 0.0): (1, 2), (16, 1.0): (1, 2)}
    assert scores(table, "snapkv", "0.2")[4, 0.0] == (0.5, 2)
    assert scores(table, "snapkv", "0.2")[16, 0.0] == (0.0, 2)
    out = capsys.readouterr().out
    assert "3 of 27 answers lack length or depth and are not in the figure" in out
    by_length, by_depth = (out.split(f"acc by {name}")[1].split("└")[0] for name in ("length", "depth"))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in by_length.splitlines() if "│" in line]
    assert lines == [
        ["full", "1.000", "100.0", "100.0", "100.0"],
        ["snapkv", "0.500", "50.0", "100.0", "77.8"],
        ["snapkv", "0.200", "75.0", "40.0", "55.6"],
    ]
    assert "25.0" in by_depth  # (0, 1, 0, 0) at depth 0
    stored = pd.read_csv(folder / "heatmap-length-depth.csv")
    pd.testing.assert_frame_equal(stored, table.astype({"size": float}), check_dtype=False)


def test_questions_are_chosen_by_a_column_and_other_columns_tabulated(folder, drawn):
    assert main([str(folder), "--where", "kind=text"]) == 0
    assert set(drawn[0]["questions"]) == {1}
    assert main([str(folder), "--x", "kind", "--y", "length"]) == 0
    own = drawn[1][(drawn[1]["size"] == "0.5") & (drawn[1]["kind"] == "image")]
    assert list(zip(own["length"], own["score"], own["questions"], strict=True)) == [(4, 0.5, 2), (16, 1.0, 3)]
    names = {"heatmap-length-depth-kind-text.png", "heatmap-kind-length.png"}
    assert {file.name for file in folder.glob("*.png")} == names


def test_a_cell_whose_kept_share_was_not_measured_is_shown(tmp_path):
    """One that a server answered, with a budget."""
    docs = [{"length": 4, "depth": 0.5}] * 4
    folder = write_answers(tmp_path, "t", "snapkv", None, "abcx", budget=64, docs=docs)
    file = folder / "snapkv-budget=64" / "results.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "efficiency": {}}))
    assert main([str(folder)]) == 0
    assert pd.read_csv(folder / "heatmap-length-depth.csv")["score"].tolist() == [0.75]


@pytest.mark.parametrize("name", ["size", "score", "questions"])
def test_a_column_named_like_one_of_a_cell_is_shown(name, tmp_path, drawn, capsys):
    docs = [{name: number, "depth": number % 2} for number in (7, 8, 9, 8)]
    folder = write_answers(tmp_path, "t", "full", 1.0, "abxd", docs=docs)
    assert main([str(folder), "--x", name, "--where", f"{name}=8"]) == 0
    assert main([str(folder), "--x", name]) == 0
    column = f"question.{name}"
    assert f"acc by {column}" in capsys.readouterr().out
    assert [dict(zip(each[column], each["score"], strict=True)) for each in drawn] == [{8: 1}, {7: 1, 8: 1, 9: 0}]
    assert pd.read_csv(folder / f"heatmap-{name}-depth.csv").columns.tolist() == [
        "series", "size", "kept", "depth", column, "score", "questions"
    ]  # fmt: skip


def test_cells_with_other_settings_have_a_figure_of_their_own(folder, drawn):
    root = folder.parents[1]
    write_answers(root, "long_needle", "full", 1.0, "xxxxxxxxx", TRUTH, docs=DOCS, settings={"limit": 9})
    assert main([str(folder)]) == 0
    assert [set(table["score"]) == {0.0} for table in drawn] == [False, True]
    assert (folder / "heatmap-length-depth-limit=9.png").is_file()


def test_a_long_whole_number_is_found_even_where_questions_lack_it(tmp_path, drawn):
    docs = [{"length": 4, "depth": 0, "id": 262148001}, {"length": 4, "depth": 1, "id": 262148002}, {"length": 4}]
    folder = write_answers(tmp_path, "t", "full", 1.0, "abc", "abc", docs=docs)
    assert main([str(folder), "--where", "id=262148002"]) == 0
    assert drawn[0]["depth"].tolist() == [1]


def test_a_column_may_mix_numbers_with_text_and_what_is_neither_is_missing(tmp_path, capsys):
    docs = [{"length": 4, "answer": answer} for answer in ("yes", 10, 9, ["no"])]
    folder = write_answers(tmp_path, "t", "full", 1.0, "abcd", docs=docs)
    assert main([str(folder), "--y", "answer"]) == 0
    assert (folder / "heatmap-length-answer.png").stat().st_size
    out = capsys.readouterr().out
    assert "1 of 4 answers lack length or answer" in out
    assert [word for word in out.split("acc by answer")[1].split() if word in ("9", "10", "yes")] == ["9", "10", "yes"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--x", "lenght"], 2, "the task's questions have no column 'lenght' (did you mean 'length'?)"),
        (["--x", "texts"], 2, "the task's questions have no column 'texts'"),
        (["--x", "depth", "--y", "depth"], 2, "--x and --y are both 'depth'"),
        (["--x", "size"], 2, "the task's questions have no column 'size'"),
        (["--where", "kind"], 2, "--where: 'kind' is not COLUMN=VALUE"),
        (["--where", "kind="], 2, "--where: 'kind=' is not COLUMN=VALUE"),
        (["--where", "=video"], 2, "--where: '=video' is not COLUMN=VALUE"),
        (["--where", "kind=\n"], 2, "is not COLUMN=VALUE"),
        (["--where", "kind=video"], 2, "--where kind='video': no question has this value"),
        (["--metric", "anls"], 1, "no finished cell with a score per question"),
    ],
)
def test_what_is_not_there_is_one_line(argv, code, message, folder, drawn, capsys):
    assert main([str(folder), *argv]) == code
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not drawn


def test_a_column_with_too_many_values_is_refused(tmp_path, drawn, capsys):
    count = heatmap.MOST_VALUES + 1
    docs = [{"length": n, "depth": 0.5} for n in range(count)]
    folder = write_answers(tmp_path, "t", "full", 1.0, "a" * count, "a" * count, docs=docs)
    assert main([str(folder)]) == 2
    assert f"column 'length' has {count} different values" in capsys.readouterr().err


def test_the_figure_has_a_panel_for_each_cell_with_its_scores(folder, figures):
    assert main([str(folder)]) == 0
    (figure,) = figures
    panels = {axis.get_title(): [text.get_text() for text in axis.texts] for axis in figure.axes if axis.get_title()}
    assert panels == {
        "full": ["100"] * 4, "snapkv 0.500": ["0", "100", "100", "100"], "snapkv 0.200": ["50", "0", "100", "100"],
    }  # fmt: skip
    assert (folder / "heatmap-length-depth.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "metric", ["acc", "a_metric_of_a_name_that_is_longer_than_the_bar_beside_it (flexible-extract)"]
)
def test_no_title_overlaps_another_and_nothing_leaves_the_canvas(tmp_path, figures_not_rendered, metric):
    options = {"pooling": "max", "observation": "every-query-of-the-question"}
    series = [f"entropy-gated-chunkkv-{n} {' '.join(f'{k}={v}' for k, v in options.items())}" for n in range(6)]
    rows = [
        {"series": name, "size": size, "kept": float(size), "depth": depth, "length": length, "score": 0.5}
        for name in series for size in ("0.5", "0.2") for depth in (0.0, 1.0) for length in (4096, 8192)
    ]  # fmt: skip
    title = "a-task-of-a-long-name, a-model-of-a-long-name: " + ", ".join(series)
    heatmap.draw(pd.DataFrame(rows), "length", "depth", title, metric, 100, tmp_path / "heat.png")
    (figure,) = figures_not_rendered
    *panels, bar = [axis for axis in figure.axes if axis.axison]
    assert len(panels) == 12
    assert "".join(bar.get_ylabel().split()) == "".join(f"{metric} (%)".split())
    titles = [panel.title.get_window_extent() for panel in panels] + [figure._suptitle.get_window_extent()]
    boxes = [panel.get_window_extent() for panel in panels] + [bar.get_tightbbox()]
    for place, box in enumerate(titles):
        assert not any(box.overlaps(other) for other in titles[place + 1 :] + boxes)
    for box in titles + boxes:
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) > -1  # pixel


def test_values_that_are_text_are_legible_beside_the_axes(tmp_path, figures_not_rendered):
    kinds = ["counting the objects in a scene", "$5 or \\frac", "two\nlines", "the same as the first " + 40 * "x"]
    rows = [
        {"series": name, "size": "0.5", "kept": 0.5, "kind": kind, "other": other, "score": 0.5}
        for name in ("snapkv", "random") for kind in kinds for other in kinds
    ]  # fmt: skip
    heatmap.draw(pd.DataFrame(rows), "kind", "other", "task, model", "acc", 100, tmp_path / "heat.png")
    (figure,) = figures_not_rendered
    for panel in figure.axes[:2]:
        assert min(panel.bbox.width, panel.bbox.height) > 100  # pixels
        for axis in (panel.xaxis, panel.yaxis):
            boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
            assert len(boxes) == len(kinds)
            for place, box in enumerate(boxes):
                assert not any(box.overlaps(other) for other in boxes[place + 1 :])
                assert box.x0 > 0
                assert box.y0 > 0
