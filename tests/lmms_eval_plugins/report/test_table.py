"""The table and the plot say what the cells on disk say."""

import io
import re

import pytest
from rich.console import Console

from lmms_eval_plugins.cells import results
from lmms_eval_plugins.cells.results import Cell
from lmms_eval_plugins.report import table
from lmms_eval_plugins.report.table_command import main

TASK = "textvqa_val"
SCORES = {"alias": TASK, "submission,none": None, "exact_match,none": 0.5, "exact_match_stderr,none": 0.02}


PLOT = table.plot


@pytest.fixture(autouse=True)
def _plot_is_not_drawn(monkeypatch):
    """A plot takes a tenth of a second, and most of these tests read the table beside it."""
    monkeypatch.setattr(table, "plot", lambda frame, title, path: path.touch())


def write_cell(root, method="snapkv", ratio=0.2, budget=None, settings=None, options=None, scores=SCORES, **numbers):
    cell = Cell(TASK, "org/model", method, ratio, budget, options or {}, settings or {})
    protocol = {
        "task": TASK, "model": cell.model, "method": method, "ratio": ratio, "budget": budget,
        "settings": cell.settings, "changed_options": cell.options,
    }  # fmt: skip
    whole = {name: numbers.pop(name) for name in ("answers_per_s", "tokens_per_s") if name in numbers}
    tokens = numbers.pop("tokens", None)
    efficiency = {name: {"median": value} for name, value in numbers.items()} | whole
    efficiency["realised_ratio"] = {"mean": ratio}
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
    row = "| snapkv | 0.2 | 50.0 ± 2.0 | 42.1 ms | 3.8 ms | 135.8 KiB | 2.0 KiB | 12.3 | 12.0 | 0.200 | 7 |"
    assert row in file.read_text()
    assert "| method | ratio kept | exact_match |" in file.read_text()
    for value in row.split(" | ")[1:-1]:
        assert value in text


def test_a_row_names_its_protocol_and_the_note_what_a_row_does_not_name(tmp_path):
    write_cell(tmp_path)
    folder = write_cell(tmp_path, options={"scope": "context", "ratio_of": "vision", "first_token": "compressed"})
    _, (file, _) = run(folder)
    text = file.read_text()
    assert "| snapkv first_token=compressed ratio_of=vision scope=context | 0.2 |" in text
    assert "names no other protocol: scope=prompt, ratio_of=prompt, first_token=full" in text


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
    assert "| snapkv | 0.2 | - | - | - | - | - | - | - | 0.200 | 7 |" in files[0].read_text()


def test_the_throughput_plot_names_every_point_and_draws_the_front(tmp_path, monkeypatch):
    cells = [
        ("full", 1.0, 0.9, 10.0),
        ("snapkv", 0.2, 0.8, 30.0),
        ("snapkv", 0.5, 0.85, 9.0),
        ("knorm", 0.2, 0.1, 31.0),
    ]
    for method, ratio, score, speed in cells:
        folder = write_cell(tmp_path, method, ratio, scores={"exact_match,none": score}, answers_per_s=speed)
    write_cell(tmp_path, "random", 0.2, scores={"exact_match,none": 0.5})  # of an earlier version, without a speed
    figures = []
    monkeypatch.setattr(table.plt, "close", figures.append)
    _, files = run(folder)
    assert [file.name for file in files] == ["report.md", "report.png", "throughput.png"]
    (axes,) = figures[0].axes
    assert {text.get_text() for text in axes.texts} == {"full", "snapkv 0.2", "snapkv 0.5", "knorm 0.2"}
    (front,) = [line for line in axes.lines if line.get_label() == "front"]
    assert front.get_xydata().tolist() == [[10, 90], [30, 80], [31, 10]]


def test_sums_are_not_shown_in_percent(tmp_path):
    folder = write_cell(
        tmp_path, scores={"mme_perception_score,none": 1500.0, "mme_perception_score_stderr,none": "N/A"}
    )
    assert "| 1500.0 |" in run(folder)[1][0].read_text()


def test_budgets_are_named(tmp_path):
    folder = write_cell(tmp_path, ratio=None, budget=64)
    assert "| snapkv | budget 64 |" in run(folder)[1][0].read_text()


def test_plot_draws_every_series_and_the_full_cache(tmp_path, monkeypatch):
    for method, ratio in (("snapkv", 0.1), ("snapkv", 0.5), ("full", 1.0), ("knorm", 0.2)):
        folder = write_cell(tmp_path, method, ratio)
    figures = []
    monkeypatch.setattr(table, "plot", PLOT)
    monkeypatch.setattr(table.plt, "close", figures.append)
    _, files = run(folder)
    (axes,) = figures[0].axes
    assert axes.get_legend_handles_labels()[1] == ["full cache", "knorm", "snapkv"]
    curve = axes.containers[1].lines[0]
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([0.1, 0.5], [50.0, 50.0])
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_what_is_shown_is_text_wherever_it_is_shown(tmp_path, monkeypatch, capsys):
    """A bar ends no cell; nothing is markup of the terminal, a formula of the plot, or HTML."""
    monkeypatch.setattr(table, "plot", PLOT)
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


def test_batch_size_of_the_times_is_named(tmp_path):
    folder = write_cell(tmp_path, settings={"batch_size": 4})
    assert "of a batch of 4" in run(folder)[1][0].read_text()


def test_folder_without_cells_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no finished cell under" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.00 GiB")]
)
def test_bytes_are_readable(count, text):
    assert table._bytes(count) == text
