"""The table and the plot say what the cells on disk say."""

import io
import re
import shutil

import pytest
from rich.console import Console

from lmms_eval_plugins.cells import results
from lmms_eval_plugins.cells.results import Cell
from lmms_eval_plugins.report import plots, table
from lmms_eval_plugins.report.appearance import colour, short_names
from lmms_eval_plugins.report.table_command import main

TASK = "textvqa_val"
SCORES = {"alias": TASK, "submission,none": None, "exact_match,none": 0.5, "exact_match_stderr,none": 0.02}


PLOT = plots.plot


@pytest.fixture(autouse=True)
def _plot_is_not_drawn(monkeypatch):
    """A plot takes a tenth of a second, and most of these tests read the table beside it."""
    monkeypatch.setattr(plots, "plot", lambda frame, title, path: path.touch())


def write_cell(
    root, method="snapkv", ratio=0.2, budget=None, settings=None, options=None, scores=SCORES, realised=None,
    per_layer=None, **numbers,
):  # fmt: skip
    cell = Cell(TASK, "org/model", method, ratio, budget, options or {}, settings or {})
    protocol = {
        "task": TASK, "model": cell.model, "method": method, "ratio": ratio, "budget": budget,
        "settings": cell.settings, "changed_options": cell.options,
    }  # fmt: skip
    whole = {name: numbers.pop(name) for name in ("answers_per_s", "tokens_per_s") if name in numbers}
    tokens = numbers.pop("tokens", None)
    efficiency = {name: {"median": value} for name, value in numbers.items()} | whole
    efficiency["realised_ratio"] = {"mean": realised or ratio} | ({"per_layer": per_layer} if per_layer else {})
    content = {"protocol": protocol, "results": {TASK: scores}, "efficiency": efficiency}
    if tokens is not None:
        content["metric_tokens"] = {TASK: {"exact_match,none": {"tokens_out": tokens, "score": 2.5}}}
    with results.new_cell(cell.folder(root)) as draft:
        results.write_cell(draft, content, [{}] * 7)
    return cell.folder(root).parent


def run(folder, settings=None):
    out = io.StringIO()
    files = table.report(folder, settings, Console(file=out, width=160))
    return out.getvalue(), files


def test_table_shows_each_cells_numbers(tmp_path):
    folder = write_cell(
        tmp_path, ttft_s=0.0421, tpot_s=0.0038, kv_bytes_prompt=2e6, kv_held_bytes=135.75 * 1024, kv_room_bytes=2048,
        answers_per_s=12.34, tokens=30,
    )  # fmt: skip
    text, (file, _) = run(folder)
    row = "| snapkv | 0.200 | 50.0 ± 2.0 | 42.1 ms | 3.8 ms | 135.8 KiB | 2.0 KiB | 12.3 | 12.0 | 7 |"
    assert row in file.read_text()
    assert "| method | kept (asked) | exact_match |" in file.read_text()
    for value in row.split(" | ")[1:-1]:
        assert value in text


def test_a_row_names_its_protocol_and_the_note_what_a_row_does_not_name(tmp_path):
    write_cell(tmp_path)
    folder = write_cell(tmp_path, options={"scope": "context", "ratio_of": "vision", "first_token": "compressed"})
    _, (file, _) = run(folder)
    text = file.read_text()
    assert "| snapkv first_token=compressed ratio_of=vision scope=context | 0.200 |" in text
    assert "Unless stated otherwise: scope=prompt, ratio_of=prompt, first_token=full" in text


def test_full_comes_first_then_methods_from_the_largest_ratio(tmp_path):
    for method, ratio in (("snapkv", 0.1), ("snapkv", 0.5), ("full", 1.0), ("knorm", 0.2)):
        folder = write_cell(tmp_path, method, ratio)
    frame = table.sweep_frame(results.load_cells(folder))
    assert list(zip(frame["method"], frame["ratio"], strict=True)) == [
        ("full", 1.0), ("knorm", 0.2), ("snapkv", 0.5), ("snapkv", 0.1),
    ]  # fmt: skip


def test_cells_of_other_settings_are_not_compared(tmp_path):
    write_cell(tmp_path, settings={"limit": 8})
    folder = write_cell(tmp_path, "knorm", settings={"limit": 250})
    _, files = run(folder, {"limit": 250})
    assert [file.name for file in files] == ["report-limit=250.md", "report-limit=250.png"]
    assert "knorm" in files[0].read_text()
    assert "snapkv" not in files[0].read_text()
    assert len(run(folder)[1]) == 4


def test_options_keep_series_of_one_method_apart(tmp_path):
    write_cell(tmp_path)
    folder = write_cell(tmp_path, options={"window_size": 8})
    frame = table.sweep_frame(results.load_cells(folder))
    assert set(frame["series"]) == {"snapkv", "snapkv window_size=8"}


def test_missing_numbers_are_dashes_and_no_plot_is_drawn(tmp_path):
    folder = write_cell(tmp_path, scores={"alias": TASK, "bypass,none": 999, "bypass_stderr,none": "N/A"})
    _, files = run(folder)
    assert [file.suffix for file in files] == [".md"]
    assert "| snapkv | 0.200 | - | - | - | - | - | - | - | 7 |" in files[0].read_text()


def test_the_throughput_plot_names_every_point_and_draws_the_front(tmp_path, figures):
    cells = [
        ("full", 1.0, 0.9, 10.0),
        ("snapkv", 0.2, 0.8, 30.0),
        ("snapkv", 0.5, 0.85, 9.0),
        ("knorm", 0.2, 0.1, 31.0),
    ]
    for method, ratio, score, speed in cells:
        folder = write_cell(tmp_path, method, ratio, scores={"exact_match,none": score}, answers_per_s=speed)
    write_cell(tmp_path, "random", 0.2, scores={"exact_match,none": 0.5})  # of an earlier version, without a speed
    _, files = run(folder)
    assert [file.name for file in files] == ["report.md", "report.png", "throughput.png"]
    (axes,) = figures[0].axes
    assert {text.get_text() for text in axes.texts} == {"full", "snapkv 0.2", "snapkv 0.5", "knorm 0.2"}
    (front,) = [line for line in axes.lines if line.get_label() == "front"]
    assert front.get_xydata().tolist() == [[10, 90], [30, 80], [31, 10]]


@pytest.fixture
def drawn(figures_not_rendered, monkeypatch):
    """Returns the figures of a report: score, then throughput."""
    monkeypatch.setattr(plots, "plot", PLOT)

    def figures(folder):
        figures_not_rendered.clear()
        run(folder)
        return figures_not_rendered

    return figures


@pytest.mark.parametrize("count", [6, 46])
def test_a_legend_of_any_length_is_on_the_canvas_and_covers_no_point(tmp_path, drawn, count):
    """All series are on the front, so all are named."""
    folder = write_cell(tmp_path, "full", 1.0, answers_per_s=1.0, scores={"exact_match,none": 1.0})
    for place in range(count):
        kept = 0.9**place
        folder = write_cell(
            tmp_path, f"a-method-of-a-long-name-{place}", kept, scores={"exact_match,none": 0.95 * kept},
            answers_per_s=1.1 / kept, options={"kernel_size": 3},
        )  # fmt: skip
    for figure in drawn(folder):
        (legend,), (axes,) = figure.legends, figure.axes
        assert len(legend.get_texts()) >= count + 1
        box, canvas = legend.get_window_extent(), figure.bbox
        assert min(box.x0 - canvas.x0, box.y0 - canvas.y0, canvas.x1 - box.x1, canvas.y1 - box.y1) > -1  # pixel
        assert not box.overlaps(axes.get_tightbbox())


@pytest.mark.parametrize("score", [0.0, 0.9])
def test_points_errors_and_names_are_inside_the_axes_and_the_title_is_no_wider(tmp_path, drawn, score):
    scores = {"exact_match,none": score, "exact_match_stderr,none": score / 20}
    options = {name: 32 for name in ("chunk_size", "kernel_size", "max_new_tokens", "recent_tokens", "window_size")}
    write_cell(tmp_path, "full", 1.0, answers_per_s=10.0, scores=scores)
    for place in range(5):
        name = f"a-method-of-a-long-name-{place}"
        folder = write_cell(tmp_path, name, 0.2, answers_per_s=90.0, scores=scores, options=options)
    for figure in drawn(folder):
        (axes,) = figure.axes
        assert axes.get_ylim()[0] < 0 <= 105 * score < axes.get_ylim()[1]
        assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes([axes._left_title, *axes.texts]))
        assert all(axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1 for box in boxes(axes.texts))
    assert "± standard error" in drawn(folder)[0].axes[0].get_ylabel()


def boxes(texts):
    return [text.get_window_extent() for text in texts]


def test_above_twelve_series_only_those_on_the_front_are_coloured_and_the_rest_is_one_entry(tmp_path, drawn):
    write_cell(tmp_path, "full", 1.0, answers_per_s=10.0, scores={"exact_match,none": 0.9})
    write_cell(tmp_path, "hindsight", 0.2, answers_per_s=2.0, scores={"exact_match,none": 0.9})
    write_cell(tmp_path, "random", 0.2, answers_per_s=20.5, scores={"exact_match,none": 0.1})
    for place in range(14):
        write_cell(tmp_path, f"worse-{place}", 0.2, answers_per_s=19.0, scores={"exact_match,none": 0.2})
    folder = write_cell(tmp_path, "snapkv", 0.2, answers_per_s=20.0, scores={"exact_match,none": 0.8})
    score, throughput = drawn(folder)
    named = ["full cache", "hindsight", "snapkv", "15 other methods"]
    assert [text.get_text() for text in score.legends[0].get_texts()] == named
    assert sorted(text.get_text() for text in throughput.legends[0].get_texts()) == sorted([*named, "front"])
    assert {text.get_text() for text in throughput.axes[0].texts} == {"full", "snapkv 0.2"}
    colours = {line.get_color() for line in score.axes[0].lines}
    assert {colour("snapkv"), colour("hindsight"), plots.GREY, "black"} == colours


def test_a_curve_lies_at_what_was_kept_not_at_what_was_asked(tmp_path, drawn):
    write_cell(tmp_path, "fastv", 0.1, realised=0.499)
    folder = write_cell(tmp_path, "fastv", 0.5, realised=0.723)
    (figure,) = drawn(folder)
    assert list(figure.axes[0].containers[0].lines[0].get_xdata()) == [0.499, 0.723]
    assert "as measured" in figure.axes[0].get_xlabel()


def test_sums_are_not_shown_in_percent(tmp_path):
    folder = write_cell(
        tmp_path, scores={"mme_perception_score,none": 1500.0, "mme_perception_score_stderr,none": "N/A"}
    )
    assert "| 1500.0 |" in run(folder)[1][0].read_text()


def test_budgets_are_named(tmp_path):
    folder = write_cell(tmp_path, ratio=None, budget=64, realised=0.1684)
    assert "| snapkv | 0.168 (budget 64) |" in run(folder)[1][0].read_text()


def test_plot_draws_every_series_and_the_full_cache(tmp_path, figures, monkeypatch):
    for method, ratio in (("snapkv", 0.1), ("snapkv", 0.5), ("full", 1.0), ("knorm", 0.2)):
        folder = write_cell(tmp_path, method, ratio)
    monkeypatch.setattr(plots, "plot", PLOT)
    _, files = run(folder)
    (axes,) = figures[0].axes
    assert axes.get_legend_handles_labels()[1] == ["full cache", "knorm", "snapkv"]
    curve = axes.containers[1].lines[0]
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([0.1, 0.5], [50.0, 50.0])
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_what_is_shown_is_text_wherever_it_is_shown(tmp_path, monkeypatch, capsys):
    """A bar ends no cell; nothing is markup of the terminal, a formula of the plot, or HTML."""
    monkeypatch.setattr(plots, "plot", PLOT)
    odd = "a|b `c` <script>\n[/INST] $5 or $ \\ _x_ *y*"
    folder = write_cell(tmp_path, options={"pooling": odd}, settings={"system_prompt": odd})
    assert main([str(folder)]) == 0
    assert "[/INST] $5 or $" in " ".join(capsys.readouterr().out.split())
    (file,) = folder.glob("*.md")
    title, _, *rows = file.read_text().splitlines()
    rows = [row for row in rows if row.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(table.TABLE_COLUMNS) + 1}
    shown = r"a\|b \`c\` &lt;script&gt; \[/INST\] $5 or $ \\ \_x\_ \*y\*"
    assert shown in title
    assert shown in rows[2]


@pytest.mark.parametrize(
    ("asked", "realised", "shown"),
    [
        (0.2, 0.2009, "0.201"),
        (0.2, 0.21, "0.210"),
        (0.2, 0.2101, "0.210 (0.2)"),
        (0.05, 0.0549, "0.0549"),  # one token of 200
        (0.05, 0.0551, "0.0551 (0.05)"),
        (0.1, 0.499, "0.499 (0.1)"),
        (0.0125, 0.0125, "0.0125"),
        (1.0, 1.0, "1.000"),
    ],
)
def test_the_share_that_was_kept_is_shown_and_what_was_asked_where_that_is_another(tmp_path, asked, realised, shown):
    folder = write_cell(tmp_path, ratio=asked, realised=realised)
    assert f"| snapkv | {shown} |" in run(folder)[1][0].read_text()


def test_where_another_share_is_kept_than_was_asked_the_file_says_what_each_layer_holds(tmp_path):
    write_cell(tmp_path, "pyramidkv", 0.2, per_layer=[0.3, 0.1])  # its mean is what was asked
    folder = write_cell(tmp_path, "fastv", 0.1, realised=0.499, per_layer=[1.0, 1.0, 0.165, 0.165, 0.165])
    text = run(folder)[1][0].read_text()
    assert "Kept by layer: fastv 0.499 (0.1): 1.000 in layers 0 to 1, 0.165 in layers 2 to 4." in text


def test_options_that_all_rows_of_a_method_share_stand_in_the_title_alone(tmp_path):
    protocol = {"first_token": "compressed"}
    write_cell(tmp_path, "full", 1.0)
    write_cell(tmp_path, "random", options=protocol)
    write_cell(tmp_path, options={**protocol, "window_size": 8, "pooling": "max"})
    folder = write_cell(tmp_path, options={**protocol, "window_size": 8, "pooling": "avg"})
    frame = table.sweep_frame(results.load_cells(folder))
    names, shared = short_names(frame)
    assert names == ["full", "random", "snapkv pooling=avg", "snapkv pooling=max"]
    assert shared == "first_token=compressed; snapkv: window_size=8"
    printed = run(folder)[0]
    assert printed.count("first_token=compressed;") == 1
    assert "snapkv pooling=max" in printed


LONG = "entropy-gated-chunkkv"


@pytest.fixture
def long_names(tmp_path):
    """Cells whose names and options need more than any terminal has."""
    for kernel in (3, 5):
        for ratio in (0.5, 0.0125):
            write_cell(tmp_path, LONG, ratio, options={"pooling": "max", "kernel_size": kernel, "window_size": 8})
    write_cell(tmp_path, "fastv", 0.1, realised=0.499)
    return write_cell(tmp_path, "full", 1.0, answers_per_s=12.0, ttft_s=0.04, kv_held_bytes=1e6)


def joined_cells(text, columns):
    """The cells of a printed table, each with its lines joined: `columns` texts for each row."""
    rows = []
    for line in text.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            rows.append(cells)
    return ["".join(row[place] for row in rows) for place in range(columns)]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_no_name_and_no_share_is_cut_in_a_narrow_terminal(long_names, width):
    out = io.StringIO()
    table.report(long_names, console=Console(file=out, width=width))
    text = out.getvalue().split("written:")[0]
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    names, shares, *_ = joined_cells(text, 3)
    for name in ("full", "fastv", f"{LONG}kernel_size=3", f"{LONG}kernel_size=5"):
        assert name in names.replace(" ", "")
    for share in ("1.000", "0.499(0.1)", "0.500", "0.0125"):
        assert share in shares.replace(" ", "")
    flat = " ".join(text.split())
    assert "Left out to fit the terminal: room, questions" in flat
    assert "for all columns see report.md" in flat


def test_what_is_piped_is_as_wide_as_it_needs(long_names, capsys):
    assert main([str(long_names)]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == 6  # none is folded
    for column in ("room", "questions", "tokens/correct", f"{LONG} kernel_size=5 ", "0.0125"):
        assert column in text


def test_batch_size_of_the_times_is_named(tmp_path):
    folder = write_cell(tmp_path, settings={"batch_size": 4})
    assert "of batches of up to 4" in run(folder)[1][0].read_text()


def test_the_times_of_each_setting_are_named(tmp_path):
    for ratio, settings in ((0.1, {"slots": 8}), (0.2, {"batch_size": 4}), (0.5, {})):
        folder = write_cell(tmp_path, ratio=ratio, settings=settings)
    text = "".join(file.read_text() for file in run(folder)[1] if file.suffix == ".md")
    for said in ("(medians)", "(medians, of batches of up to 4)", "(medians, with slots=8: per token"):
        assert text.count(said) == 1


def test_a_folder_of_several_tasks_gets_the_table_of_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "plot", PLOT)
    folders = [write_cell(tmp_path / task) for task in ("one", "two")]
    assert main([str(tmp_path)]) == 0
    assert all((folder / "report.md").exists() for folder in folders)
    assert "written: " in capsys.readouterr().out


def test_what_an_interrupted_evaluation_left_behind_is_no_folder_of_its_own(tmp_path):
    folder = write_cell(tmp_path)
    shutil.copytree(next(folder.glob("snapkv*")), folder / ".unfinished-1" / "new")
    assert main([str(tmp_path)]) == 0
    assert [file.parent for file in tmp_path.rglob("report.md")] == [folder]


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.00 GiB")]
)
def test_bytes_are_readable(count, text):
    assert table._bytes(count) == text
