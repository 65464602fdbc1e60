"""The report says what the cells on disk say; its page works in a browser, wide and narrow, without network."""

import base64
import json
import re
import shutil
import zlib

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from kvcompress.__main__ import main
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import results
from lmms_eval_plugins.cells.kept_tokens_file import read_kept_tokens, write_kept_tokens
from lmms_eval_plugins.cells.results import Cell
from lmms_eval_plugins.model.kept_tokens import jpeg, packed_bits, packed_worth
from lmms_eval_plugins.report import grid, numbers
from lmms_eval_plugins.report.appearance import MARKERS, colour
from lmms_eval_plugins.report.groups import gold, load_groups
from lmms_eval_plugins.report.html import show
from lmms_eval_plugins.report.html.data import made, mean_needs_kept, needs_by_question, page_data
from lmms_eval_plugins.report.html.page import TEMPLATES
from lmms_eval_plugins.report.html.tables import markdown_group, write_tables
from tests.support.browser import opened
from tests.support.result_cells import write_answers

TASK, LAYERS, HEADS, SIDE, QUESTIONS = "signs_val", 3, 2, 4, 25
SCORES = {("full", 1.0): 1.0, ("snapkv", 0.5): 0.96, ("snapkv", 0.1): 0.4, ("random", 0.5): 0.6, ("random", 0.1): 0.08}
SPEED = {1.0: 0.008, 0.5: 0.006, 0.1: 0.004}


def entry(doc_id, ratio):
    """What survives: of the image as many patches as the ratio says, more in later layers; all text."""
    kept = np.zeros((LAYERS, HEADS, SIDE * SIDE), dtype=bool)
    for layer in range(LAYERS):
        kept[layer, :, : round(ratio * SIDE * SIDE) + layer] = True
    view = {"start": 0, "rows": SIDE, "columns": SIDE, "stride": SIDE, "box": [0, 0, 1, 1]}
    pixels = np.full((40, 60, 3), 200, dtype=np.uint8)
    pixels[:, doc_id % 60] = 0
    picture = Image.fromarray(pixels)
    return {
        "task": TASK, "doc_id": doc_id, "layers": list(range(LAYERS)), "kv_heads": HEADS,
        "vision": packed_bits(kept), "text": packed_bits(np.ones((LAYERS, HEADS, 2), dtype=bool)),
        "pieces": ["what", "?\n"],
        "images": [{
            "jpeg": base64.b64encode(jpeg(picture)).decode(), "size": [60, 40],
            "layout": {"start": 0, "tokens": SIDE * SIDE, "views": [view], "note": ""},
        }],
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Five cells of 25 questions, on disk as an evaluation leaves them; what survived is known of the first three."""
    root = tmp_path_factory.mktemp("results")
    for (method, ratio), score in SCORES.items():
        cell = Cell(TASK, "org/model", method, ratio, settings={"limit": QUESTIONS})
        options = {"sinks": 4, "pooling": None} | ({"window_size": int(20 * ratio)} if method == "snapkv" else {})
        protocol = {
            "task": TASK, "model": cell.model, "method": method, "ratio": ratio, "budget": None,
            "settings": cell.settings, "changed_options": {}, "scope": "prompt", "first_token": "full",
            "options": options,
        }  # fmt: skip
        efficiency = {name: {"median": SPEED[ratio]} for name in ("ttft_s", "tpot_s")}
        efficiency |= {
            "kv_held_bytes": {"median": 1e6 * ratio},
            "tokens_out": {"median": 1},
            "realised_ratio": {"mean": ratio, "per_layer": [ratio] * LAYERS},
        }
        scores = {"alias": TASK, "exact_match,none": score, "exact_match_stderr,none": 0.05}
        samples = []
        for doc in range(QUESTIONS):
            right = doc < round(score * QUESTIONS)
            measurement = dict.fromkeys(("tokens_in", "tokens_out", "vision_tokens", "kv_bytes_prompt"), 18)
            answer = str(doc) if right else "no & idea"
            samples.append(
                {
                    "task": TASK, "doc_id": doc, "input": f"What is {doc}? <script>alert(1)</script>", "target": "x",
                    "doc": {"answers": [str(doc)] * 3 + ["other"]}, "filtered_resps": [answer],
                    "exact_match": float(right), "measurement": {**measurement, "ttft_s": 0.1, "tpot_s": None},
                }
            )  # fmt: skip
        with results.new_cell(cell.folder(root)) as draft:
            write_kept_tokens(draft, cell.folder(root).parent / "images", 3, [entry(doc, ratio) for doc in range(3)])
            results.write_cell(
                draft, {"protocol": protocol, "results": {TASK: scores}, "efficiency": efficiency}, samples
            )
    return root


@pytest.fixture(scope="module")
def report(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert main(["report", str(root), "--out", str(out)]) == 0
    return out


def test_tables_show_text_as_text(root, tmp_path):
    odd = "a|b `c` <script>\n^~ $5"
    groups = load_groups(root)
    groups[0].frame["series"] = odd
    groups[0].frame["settings_text"] = odd
    write_tables(groups, tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert r"a\|b \`c\` &lt;script&gt; ^~ $5" in text
    assert "<script>" not in text
    for part in text.split("\n\n"):
        rows = [row for row in part.splitlines() if row.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) <= 1
    assert r"\textasciicircum{}\textasciitilde{}" in (tmp_path / "tables.tex").read_text()


def test_batch_sizes_may_be_numbers_and_auto(tmp_path):
    for size in (4, "auto"):
        write_answers(tmp_path / "results", "one", "full", 1.0, "abcd", settings={"batch_size": size})
    write_tables(load_groups(tmp_path / "results"), tmp_path)
    assert set(pd.read_parquet(tmp_path / "cells.parquet")["batch_size"]) == {"4", "auto"}


def test_files_hold_every_cell_and_every_sample(report):
    cells, samples = pd.read_parquet(report / "cells.parquet"), pd.read_parquet(report / "samples.parquet")
    assert {(row.method, row.ratio): row.score for row in cells.itertuples()} == SCORES
    assert len(samples) == len(SCORES) * QUESTIONS
    scores = samples.groupby(["series", "size"])["score"].mean()
    assert scores["snapkv", 0.1] == pytest.approx(0.4)
    assert samples["gold"][7] == "7 | other"
    for name, frame in (("cells", cells), ("samples", samples)):
        text = pd.read_csv(report / f"{name}.csv", dtype={"answer": str, "gold": str})
        assert len(text) == len(frame)
        assert list(text.columns) == list(frame.columns)
        assert "index" not in frame
    assert not list(report.glob("*.tmp"))


def test_accepted_answers_are_the_documents_else_the_tasks_target():
    assert gold({"doc": {"answers": ["no", "yes", "yes"]}, "target": "x"}) == "yes | no"
    assert gold({"doc": {"answer": "yes"}, "target": "x"}) == "yes"
    assert gold({"doc": {"question": "?"}, "target": "x"}) == "x"
    assert gold({"target": ["x", "y"]}) == "x | y"


def test_a_page_of_cells_without_a_metric_calls_it_score(root):
    groups = load_groups(root)
    groups[0].frame["metric"] = ""
    assert page_data(groups)["groups"][0]["metric"] == "score"


def test_markdown_holds_the_scores_by_ratio(report):
    text = (report / "tables.md").read_text()
    assert "| snapkv | 0.100 | 40.0 ± 5.0 |" in text
    assert "| method | 1 | 0.5 | 0.1 |" in text
    assert "| random |  | 60.0 ± 5.0 | 8.0 ± 5.0 |" in text


def test_the_page_is_one_file_that_names_no_address(report):
    page = (report / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.findall(r"@import|url\((?!data:)", page)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "<script>alert(1)" not in page


def check_data(page: str) -> None:
    """The page holds what its script reads: browsers are not on every machine."""
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    script = "".join((TEMPLATES / name).read_text() for name in ("common.js", "page.js"))
    (group,) = data["groups"]
    overlay, question = next(iter(group["overlays"].values())), group["questions"][0]
    parts = {"DATA": data, "group": group, "cell": group["cells"][0], "overlay": overlay, "question": question}
    for name, part in parts.items():
        made = {*re.findall(rf"\b{name}\.(\w+) (?:\?\?)?= ", script)}
        assert set(re.findall(rf"\b{name}\.([a-z]\w*)", script)) - made <= set(part), name
    assert {question["key"] for question in group["questions"]} >= set(group["overlays"])
    for kept in (kept for overlay in group["overlays"].values() for kept in overlay["cells"].values()):
        assert set(kept) == {"vision", "text"}
    files = {image["file"] for overlay in group["overlays"].values() for image in overlay["images"]}
    assert files == set(data["images"])
    assert all(len(question["a"]) == len(question["s"]) == len(group["cells"]) for question in group["questions"])


def test_the_page_holds_what_its_script_reads(report):
    check_data((report / "report.html").read_text())


def test_an_image_stands_in_the_page_once_and_budgets_are_means_over_questions(root):
    (group,) = page_data(load_groups(root))["groups"]
    images = page_data(load_groups(root))["images"]
    assert len(images) == 3
    assert all(url.startswith("data:image/jpeg;base64,") for url in images.values())
    cell = next(cell for cell in group["cells"] if (cell["method"], cell["ratio"]) == ("snapkv", 0.5))
    tokens = SIDE * SIDE
    expected = [[(tokens / 2 + layer + 2) / (tokens + 2)] * HEADS for layer in range(LAYERS)]
    np.testing.assert_allclose(cell["per_head"], expected, atol=1e-4)
    assert {cell["method"] + cell["size"]: cell["same"] for cell in group["cells"]} == pytest.approx(
        {"full1": 1, "snapkv0.5": 0.96, "snapkv0.1": 0.4, "random0.5": 0.6, "random0.1": 0.08}
    )


def test_what_the_answer_needs_is_held_against_what_each_cell_kept_of_the_same_question():
    worth = np.zeros((LAYERS, HEADS, SIDE * SIDE + 2), dtype=np.float32)
    worth[..., 0], worth[..., 5], worth[..., -1] = 2, 1, 1  # two patches, and a word
    parts = {"vision": worth[..., : SIDE * SIDE], "text": worth[..., SIDE * SIDE :]}
    hindsight = entry(0, 1.0) | {"needs": {kind: packed_worth(part, worth.max(2)) for kind, part in parts.items()}}
    cells = [[hindsight, entry(1, 1.0)], [entry(0, 1 / 8), entry(1, 1 / 8)], [entry(1, 0.5)]]
    needed = needs_by_question(cells)
    assert list(needed) == [f"{TASK}/0"]
    assert np.array(mean_needs_kept(cells[0], needed)) == pytest.approx(1)
    # The first layer keeps two patches and all words, the last four.
    kept = np.array(mean_needs_kept(cells[1], needed))
    assert kept == pytest.approx(np.array([[0.75] * HEADS] * LAYERS), abs=0.01)
    assert mean_needs_kept(cells[2], needed) is None


def test_every_cell_is_tested_against_the_full_cache(root, report):
    (group,) = load_groups(root)
    cells = page_data([group])["groups"][0]["cells"]
    assert cells[0]["method"] == "full"
    assert cells[0]["against"] is None
    tests = grid.paired_tests(grid.load_grid([group.cells[0]["folder"].parent])[0])
    for cell, test in zip(cells[1:], tests.itertuples(), strict=True):
        assert cell["against"] == {
            "questions": QUESTIONS, "difference": test.difference, "low": test.low, "high": test.high,
            "holm": test.holm, "not_worse": 0, "broken": test.broken, "mended": 0, "margin": 2,
        }  # fmt: skip
        assert cell["against"]["broken"] / QUESTIONS == pytest.approx(cells[0]["score"] - cell["score"])
    written = pd.read_csv(report / "cells.csv")
    assert written["against_full_holm"][1:].tolist() == pytest.approx(tests["holm"])
    table = (report / "tables.md").read_text().partition("Against the full cache:")[2].strip().split("\n\n")[0]
    assert len(table.splitlines()) == 2 + len(tests)
    assert f"| {tests['difference'][0]:.1f} |" in table.splitlines()[2]


def test_without_a_full_cache_or_a_score_per_question_nothing_is_tested(tmp_path):
    write_answers(tmp_path, "letters", "knorm", 0.5, "abcx")
    (group,) = load_groups(tmp_path)
    assert page_data([group])["groups"][0]["cells"][0]["against"] is None
    assert "Against the full cache" not in markdown_group(group)
    folder = write_answers(tmp_path, "letters", "full", 1.0, "abcd")
    for file in folder.glob("*/samples.jsonl"):
        file.write_text(file.read_text().replace('"acc": 1.0', '"acc": {"question_id": 3}'))
    (group,) = load_groups(tmp_path)
    assert [cell["against"] for cell in page_data([group])["groups"][0]["cells"]] == [None, None]
    assert "Against the full cache" not in markdown_group(group)


def test_groups_are_found_from_any_folder_above_the_cells_and_kept_apart(root, tmp_path):
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    cell = tmp_path / TASK / "org__model" / "random-0.1-limit=25" / "results.json"
    other = json.loads(cell.read_text())
    other["protocol"]["settings"] = {"limit": 8}
    (tmp_path / ".unfinished-1" / "new").mkdir(parents=True)
    (tmp_path / ".unfinished-1" / "new" / "results.json").write_text("{")
    cell.write_text(json.dumps(other))
    for folder in (tmp_path, tmp_path / TASK, tmp_path / TASK / "org__model"):
        assert [len(group.cells) for group in load_groups(folder)] == [4, 1]


def test_damaged_parts_are_left_out_and_named(root, tmp_path, capsys):
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    cells = tmp_path / TASK / "org__model"
    (cells / "random-0.5-limit=25" / "results.json").write_bytes(b"\xff")
    (cells / "random-0.1-limit=25" / "samples.jsonl").write_text("{}\n" * QUESTIONS)
    (cells / "snapkv-0.5-limit=25" / "survivors.jsonl").write_text("")
    image = next((cells / "images").iterdir())
    image.unlink()
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"left out: {cells}/") for line in lines)
    assert [line.removeprefix(f"left out: {cells}/").split(": ")[0] for line in lines] == [
        "random-0.1-limit=25", "random-0.5-limit=25", f"images/{image.name}", "snapkv-0.5-limit=25",
    ]  # fmt: skip
    (group,) = load_groups(tmp_path)
    assert [cell["method"] for cell in page_data([group])["groups"][0]["cells"]] == ["full", "snapkv", "snapkv"]


def test_a_model_that_is_given_by_a_relative_path_is_found(root, tmp_path):
    shutil.copytree(root / TASK / "org__model", tmp_path / TASK / ".__model")
    assert len(load_groups(tmp_path)) == 1


# -- in a browser


AT_LOAD = """addEventListener("load", () => { window.atLoad = [...document.querySelectorAll("#overlays canvas")].map(
    (canvas) => new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size); });"""


def test_all_of_the_page_is_there_when_it_is_loaded(browser, report):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.add_init_script(AT_LOAD)
    page.goto(f"file://{report / 'report.html'}")
    colours = page.evaluate("window.atLoad")
    assert len(colours) == 3  # full, and the two methods at the size that is shown first
    assert min(colours) > 2
    page.close()


def test_of_the_scores_by_size_those_that_compare_are_the_best_also_of_budgets(browser, tmp_path):
    cells = (("hindsight", "abcd"), ("snapkv", "abcx"), ("h2o", "xbcd"), ("knorm", "abxx"), ("tova", "ab"))
    for ratio, budget in ((0.5, None), (0.2, None), (None, 64)):
        for method, answers in cells:
            truth = "abcd"[: len(answers)]
            folder = write_answers(tmp_path / "results", "t", method, ratio, answers, truth=truth, budget=budget)
    assert main(["report", str(folder), "--out", str(tmp_path)]) == 0
    page, _, _ = opened(browser, tmp_path / "report.html")
    assert page.locator("#matrix b").all_inner_texts() == ["75.0"] * 6
    page.close()


@pytest.mark.parametrize(("is_lower_better", "marks"), [(False, "✓✗"), (True, "✗✓")])
def test_answers_are_right_where_the_metric_says_so(browser, tmp_path, is_lower_better, marks):
    folder = write_answers(tmp_path, "t", "full", 1.0, "ax", truth="ab", is_lower_better=is_lower_better)
    assert main(["report", str(folder), "--out", str(tmp_path)]) == 0
    page, _, _ = opened(browser, tmp_path / "report.html")
    assert "".join(page.locator("#sample-list .answer b").all_inner_texts()) == marks
    page.select_option("#filter", "wrong")
    assert page.locator("#sample-list .answer b").all_inner_texts() == ["✗"]
    page.close()


def test_the_page_reads_bits_as_python_packs_them(browser, report):
    page = browser.new_page()
    page.goto(f"file://{report / 'report.html'}")
    generator = np.random.default_rng(0)
    mixed = generator.random((4, 3, 700)) < np.linspace(0, 1, 700) ** 4
    kept = [mixed, mixed & False, mixed | True, generator.random((8, 8, 6000)) < 0.5, mixed[:1, :1, :3]]
    kept.append(np.repeat(kept[3][:1, :1], 60, axis=0))  # far back and long again
    for bits in kept:
        read = page.evaluate("packed => [...bits(packed)]", packed_bits(bits))
        assert read == np.packbits(bits, bitorder="little").tolist()
    stored = {"shape": [1, 1, 160_000], "bits": base64.b64encode(zlib.compress(bytes(range(200)) * 100, 0)).decode()}
    assert page.evaluate("packed => [...bits(packed)]", stored) == list(range(200)) * 100
    for whole in (stored, packed_bits(mixed)):
        with pytest.raises(Exception, match="the page is damaged"):
            page.evaluate("packed => [...bits(packed)]", {**whole, "bits": whole["bits"][:-40]})
    page.close()


def test_every_axis_has_round_numbers_on_it(browser, report):
    page = browser.new_page()
    page.goto(f"file://{report / 'report.html'}")
    shown = "([low, high, log, of]) => ticks(low, high, log, of === bytes).map(of)"

    def marks(low, high, log, of):
        return page.evaluate(f"([low, high, log]) => ({shown})([low, high, log, {of}])", [low, high, log])

    assert marks(0.04, 1.1, True, "percent") == ["5 %", "10 %", "20 %", "50 %", "100 %"]
    assert marks(0.26, 0.46, True, "percent") == ["30 %", "35 %", "40 %", "45 %"]  # between 20 % and 50 %
    assert marks(70_000, 1_500_000, True, "bytes") == ["128.0 KiB", "256.0 KiB", "512.0 KiB", "1.0 MiB"]
    assert marks(1_150_000, 1_600_000, True, "bytes") == ["1.1 MiB", "1.2 MiB", "1.3 MiB", "1.4 MiB", "1.5 MiB"]
    assert marks(0.036, 0.107, False, "milliseconds") == ["40.0 ms", "60.0 ms", "80.0 ms", "100.0 ms"]
    page.close()


def column(page, place):
    return page.locator(f"#cells-table tbody tr td:nth-child({place})").all_inner_texts()


def picture(page, series):
    return page.evaluate(f"document.querySelector('[data-series={series}] canvas').toDataURL()")


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_the_page_works_in_a_browser(browser, report, width):
    page, said, asked = opened(browser, report / "report.html", viewport={"width": width, "height": 900})
    page.wait_for_selector("[data-series=snapkv] canvas")

    # Sorting: by method as it comes, then by score, both ways.
    page.click("#cells-table th:nth-child(3)")
    scores = [float(text.split()[0]) for text in column(page, 3)]
    assert scores == sorted((100 * score for score in SCORES.values()), reverse=True)
    page.click("#cells-table th:nth-child(3)")
    assert [float(text.split()[0]) for text in column(page, 3)] == scores[::-1]
    assert page.get_attribute("#cells-table th:nth-child(3)", "aria-sort") == "ascending"

    assert page.inner_text("#cells-warning").startswith(f"{TASK}: the median answer has 1 token. With first_token=full")

    # Plots: a point per cell; the front is what nothing beats; a method can be hidden.
    assert page.locator("#plot-size .point").count() == 5
    front = page.get_attribute("#plot-size .front", "points").split()
    assert len(front) == 3  # snapkv at 0.1 and 0.5, full
    page.click("#legend button:has-text('snapkv')")
    assert page.locator("#plot-size .point").count() == 3
    page.select_option("#x-time", "ttft_s")
    assert "time to first token" in page.text_content("#plot-time svg")

    # All settings: an axis for each that varies; what is drawn along one chooses lines, a click takes that back.
    page.click("#legend button:has-text('snapkv')")
    lines, axis = page.locator("#plot-all .cell"), page.locator("[data-axis=kept]")
    names = [name.get_attribute("data-axis") for name in page.locator("#plot-all .axis").all()]
    assert names == ["method", "window_size", "kept", "KV cache", "per token", "exact_match"]
    assert (lines.count(), page.locator("#plot-all .unchosen").count()) == (5, 0)
    axis.scroll_into_view_if_needed()
    box = axis.bounding_box()
    x, top, middle = (box["x"] + box["width"] / 2, box["y"] + 1, box["y"] + box["height"] / 2)
    for end, unchosen in ((middle, 2), (top, 0)):
        page.mouse.move(x, top)
        page.mouse.down()
        page.mouse.move(x, end)
        page.mouse.up()
        assert (lines.count(), page.locator("#plot-all .unchosen").count()) == (5, unchosen)
    page.click("#legend button:has-text('snapkv')")

    # Overlay: each layer is another picture; a patch that is kept is as bright as the image, another is dark.
    page.select_option("#survivor-size", "0.5")
    page.wait_for_function("document.querySelectorAll('#overlays .card').length === 3")
    seen = set()
    for layer in (1, 2, 3):
        page.fill("#layer", str(layer))
        page.wait_for_function(f"document.getElementById('layer-name').textContent === '{layer - 1}'")
        page.wait_for_timeout(150)
        seen.add(picture(page, "snapkv"))
    assert len(seen) == 3
    light = page.evaluate(
        """() => { const c = document.querySelector('[data-series=snapkv] canvas');
        const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return [0, 1, 2, 3].flatMap(row => [0, 1, 2, 3].map(column => pixels[4 * (
            Math.round((row + 0.5) * c.height / 4) * c.width + Math.round((column + 0.5) * c.width / 4))])); }"""
    )
    assert [value > 120 for value in light] == [True] * 10 + [False] * 6  # half of 16, and two more in layer 2

    # Answers: filters and search.
    page.select_option("#sample-size", "0.1")
    page.select_option("#filter", "differs")
    assert page.locator("#sample-list .sample").count() == 20
    page.click("#more")
    assert page.locator("#sample-list .sample").count() == 23  # random has 2 of 25 right at 0.1
    assert page.locator("#sample-list .sample:first-of-type .answer.bad").count() == 1
    page.fill("#search", "is 24?")
    assert page.locator("#sample-list .sample").count() == 1
    assert "<script>alert(1)</script>" in page.inner_text("#sample-list")

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()


# -- with the bundled model


@pytest.mark.slow
def test_overlays_are_stored_once_asked_for(clean_process, tmp_path, capsys):
    words = ["tiny_textvqa", "tiny", "snapkv", "0.2", "--limit", "3", "window_size=4"]
    folder = tmp_path / "results" / "tiny_textvqa" / "tiny" / "snapkv-0.2-limit=3-window_size=4"
    assert evaluate.main([*words]) == 0
    assert list(read_kept_tokens(folder)) == []
    assert evaluate.main([*words, "--overlays", "2"]) == 0
    assert "computing again" in capsys.readouterr().out
    assert [one["doc_id"] for one in read_kept_tokens(folder)] == [0, 1]
    assert len(list((folder.parent / "images").iterdir())) == 2
    assert evaluate.main([*words, "--overlays", "1"]) == 0
    assert "complete and skipped" in capsys.readouterr().out
    assert "survivors" not in (folder / "samples.jsonl").read_text()
    assert main(["report", "results"]) == 0


@pytest.mark.slow
def test_overlays_are_of_the_first_questions_that_are_asked(clean_process, tmp_path):
    words = ["tiny_textvqa", "tiny", "snapkv", "0.2", "--limit", "2", "--offset", "3", "--overlays", "1"]
    assert evaluate.main(words) == 0
    (folder,) = tmp_path.glob("results/*/*/snapkv*")
    assert [one["doc_id"] for one in read_kept_tokens(folder)] == [3]


def test_show_writes_the_overlay_of_one_image(clean_process, tmp_path, capsys):
    Image.new("RGB", (200, 120), (200, 60, 60)).save("a.png")
    assert main(["show", "a.png", "What is it?", "--method", "snapkv,random", "--ratio", "0.2", "window_size=4"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"full: '.*', keeps 100.0% of the image tokens and 100.0% of the text tokens", said)
    shares = re.search(r"snapkv window_size=4 0.2: '.*', keeps (.*)% of the image tokens and (.*)% of the text", said)
    assert 0 < float(shares[1]) < 25
    page = (tmp_path / "survivors.html").read_text()
    assert "data:image/jpeg" in page
    check_data(page)
    assert main(["show", "a.png", "What is it?", "--out", "b.png"]) == 0
    with Image.open("b.png") as picture:
        assert picture.width > 600


def test_a_method_that_changes_the_input_has_nothing_to_show(clean_process, capsys):
    Image.new("RGB", (20, 20)).save("a.png")
    assert main(["show", "a.png", "What is it?", "--method", "snapkv,downsample"]) == 2
    assert "method 'downsample' changes the input and evicts nothing" in capsys.readouterr().err


def test_a_picture_is_dark_where_patches_were_evicted():
    one = entry(0, 0.5)
    kept = np.zeros(SIDE * SIDE)
    kept[: SIDE * 2] = 1.0
    kept[SIDE * 2 : SIDE * 3] = 0.25
    panel = Figure().subplots()
    show.draw(panel, one["images"], kept)
    picture, dark = panel.images
    assert picture.get_array().shape[:2] == (40, 60)
    opacity = dark.get_array()[..., 3]
    assert not dark.get_array()[..., :3].any()
    np.testing.assert_allclose(opacity, [[0.0] * SIDE] * 2 + [[show.DARKEST / 2] * SIDE] + [[show.DARKEST] * SIDE])


def test_where_the_patches_places_are_not_known_a_strip_shows_the_images_tokens():
    images = [{"layout": {"start": 2, "tokens": 5, "views": [], "note": "of another family"}}]
    panel = Figure().subplots()
    show.draw(panel, images, np.linspace(0, 1, 11))
    (strip,) = panel.images
    np.testing.assert_allclose(strip.get_array(), [np.linspace(0, 1, 11)[2:7]])


@pytest.mark.parametrize("question", ["What is it?\nAnswer with a word.", ""])
def test_a_picture_is_titled_with_the_questions_first_line(tmp_path, figures, question):
    show.write_png(tmp_path / "a.png", question, [{"entry": entry(0, 0.5), "name": "snapkv 0.5", "answer": "red"}])
    (figure,) = figures
    assert figure.get_suptitle() == question.partition("\n")[0]


def test_no_text_of_a_picture_is_cut_or_taken_for_a_formula(tmp_path, figures_not_rendered):
    name = "entropy-gated-chunkkv head_budget=adaptive layer_budget=pyramid 0.2"
    rows = [{"entry": entry(0, 0.5), "name": name, "answer": "white, or $\\frac " + 30 * "white "}] * 3
    show.write_png(tmp_path / "a.png", "Is it $5, or $\\frac, " + 40 * "or more " + "?", rows)
    (figure,) = figures_not_rendered
    labels = [axis.yaxis.label for axis in figure.axes if axis.get_ylabel()]
    assert len(labels) == 3
    boxes = [text.get_window_extent() for text in (figure._suptitle, *labels)]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) > -1  # pixel


def test_each_cell_comes_with_its_methods_colour_a_marker_of_its_own_and_what_it_kept(root):
    (group,) = page_data(load_groups(root))["groups"]
    for cell in group["cells"]:
        assert cell["colour"] == colour(cell["method"])
        assert cell["kept"] == numbers.kept(cell["realised"], cell["ratio"], cell["budget"])
    shown = {(cell["colour"], cell["marker"]) for cell in group["cells"]}
    assert len(shown) == len({cell["series"] for cell in group["cells"]})


def test_the_header_says_on_what_when_and_with_which_versions_also_where_these_differ():
    def cell(device, date, torch):
        versions = {"torch": torch, "transformers": "5.23.0"}
        environment = {"device": device, "versions": versions}
        return {"protocol": {"model": "tiny"}, "environment": environment, "date": f"{date}T06:02:07+00:00"}

    cells = [cell("cpu (x86_64)", "2026-11-24", "2.15.0"), cell("NVIDIA H100", "2026-11-23", "2.15.0")]
    assert made(cells) == (
        "tiny, on cpu (x86_64) and NVIDIA H100, 2026-11-23 to 2026-11-24, torch 2.15.0, transformers 5.23.0"
    )
    assert made(cells[:1]) == "tiny, on cpu (x86_64), 2026-11-24, torch 2.15.0, transformers 5.23.0"


def test_a_page_knows_every_marker_and_no_palette():
    script = (TEMPLATES / "common.js").read_text(encoding="utf-8")
    table = script[script.index("const MARKERS = {") : script.index("};", script.index("const MARKERS = {"))]
    assert set(re.findall(r'(?:^|[ {])"?([a-zA-Z^<>*])"?: ', table, re.MULTILINE)) == set(MARKERS)
    assert not re.search(r"#[0-9a-f]{6}", script)


def test_settings_in_another_order_are_the_same_and_the_tokens_of_all_rounds_count(tmp_path):
    metadata = [{"lengths": [1024], "seed": 3}, {"seed": 3, "lengths": [1024]}]
    for method, ratio, known in (("full", 1.0, metadata[0]), ("snapkv", 0.2, metadata[1])):
        folder = write_answers(tmp_path, "t", method, ratio, "abcd", tokens=3, settings={"metadata": known})
    samples = next(folder.glob("snapkv*")) / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows = [row | {"measurements": [row["measurement"]] * 2} for row in rows]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = load_groups(folder)
    assert [own["tokens_out"].iloc[0] for own in group.frame["questions"]] == [3, 6]


def test_of_repeated_answers_the_mean_tokens_count(tmp_path):
    folder = write_answers(tmp_path, "t", "full", 1.0, "abcd", tokens=3)
    results = next(folder.glob("full*")) / "results.json"  # of `--repeats`, or of the task's own file
    results.write_text(json.dumps(json.loads(results.read_text()) | {"configs": {"t": {"repeats": 2}}}))
    samples = next(folder.glob("full*")) / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows = [row | {"measurements": [row["measurement"], row["measurement"] | {"tokens_out": 4}]} for row in rows]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = load_groups(folder)
    assert group.frame["questions"].iloc[0]["tokens_out"].tolist() == [3.5] * 4
