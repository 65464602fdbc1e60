"""The page says what the submissions say; it works in a browser, wide and narrow, light and dark, without network."""

import json
import re
import shlex

import pytest

from kvcompress.files import write_text
from lmms_eval_plugins.leaderboard.command import TEMPLATES, main
from lmms_eval_plugins.report.html.page import TEMPLATES as SHARED
from tests.lmms_eval_plugins.leaderboard.conftest import ARCHIVE
from tests.support.browser import opened
from tests.support.result_cells import write_answers

SCOPE = {"scope": "prompt", "ratio_of": "prompt", "options": {}}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """What ships, and a submission of two other models on a GPU."""
    other = tmp_path_factory.mktemp("theirs")
    for model in ("org/one", "org/two"):
        for method, ratio, answers in (("full", 1.0, "abcd"), ("snapkv", 0.5, "abcx"), ("<b>", 0.5, "axxx")):
            write_answers(other, "letters", method, ratio, answers, model=model, tokens=9, protocol=SCOPE)
    for file in other.rglob("results.json"):
        write_text(file, json.dumps({**json.loads(file.read_text()), "environment": {"device": "NVIDIA H200"}}))
    page = tmp_path_factory.mktemp("page") / "leaderboard.html"
    assert main([str(ARCHIVE), str(other), "--out", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def data(page_file):
    return json.loads(re.search(r'id="data">(.*?)</script>', page_file.read_text())[1])


def test_the_page_is_one_file_that_names_no_address(page_file):
    page = page_file.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.findall(r"@import|url\((?!data:)", page)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_holds_what_its_script_reads(data):
    """Browsers are not on every machine."""
    script = "".join((folder / name).read_text() for folder, name in ((SHARED, "common.js"), (TEMPLATES, "board.js")))
    board = data["boards"][0]
    made = {"group": {"all", "series", "labels"}, "board": {"most"}, "cell": set()}
    for name, part in {"group": board, "board": board, "cell": board["cells"][0]}.items():
        assert set(re.findall(rf"\b{name}\.([a-z]\w*)", script)) - made[name] <= set(part), name


def test_what_ships_has_every_regime_each_with_its_command_and_versions(data):
    boards = [board for board in data["boards"] if board["task"] != "letters" and board["cells"][0]["environment"]]
    assert {board["regime"] for board in boards} >= {"an image", "several images", "video"}
    for board in boards:
        assert sum(cell["method"] == "full" for cell in board["cells"]) == 1
        for cell in board["cells"]:
            words = shlex.split(cell["command"])
            assert words[:4] == ["./scripts/run_eval.sh", board["task"], "tiny", cell["method"]]
            assert cell["versions"]["torch"]
            assert cell["environment"]["device"]
            if cell["interval"] is None:  # all questions have the same score
                assert cell["score"] in (0, 1)
            else:
                assert cell["interval"][0] <= cell["score"] <= cell["interval"][1]
            assert (cell["kv_bytes"], cell["ttft_s"], cell["answers_per_s"]) > (0, 0, 0)


def test_cells_without_a_score_are_no_page(tmp_path, capsys):
    folder = write_answers(tmp_path, "letters", "full", 1.0, "abcd", protocol=SCOPE)
    file = folder / "full-1" / "results.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "results": {}}))
    assert main([str(tmp_path), "--out", str(tmp_path / "a.html")]) == 1
    assert capsys.readouterr().err == "error: no cell has a score (were they run with --predict_only?)\n"


def test_the_page_says_why_no_method_is_chosen(browser, tmp_path):
    for method in ("full", "snapkv", "knorm"):
        write_answers(tmp_path, "letters", method, 1.0 if method == "full" else 0.5, "abcd", protocol=SCOPE)
    assert main([str(tmp_path), "--out", str(tmp_path / "a.html")]) == 0
    page, _, _ = opened(browser, tmp_path / "a.html")
    assert page.locator("#choices button").count() == 0
    assert page.inner_text("#no-choice").startswith("None is chosen here")


def test_the_plot_of_the_best_counts_neither_the_full_cache_nor_hindsight_as_methods(browser, tmp_path):
    for method in ("full", "snapkv", "knorm", "hindsight"):
        write_answers(tmp_path, "letters", method, 1.0 if method == "full" else 0.5, "abcd", protocol=SCOPE)
    assert main([str(tmp_path), "--out", str(tmp_path / "a.html")]) == 0
    page, _, _ = opened(browser, tmp_path / "a.html")
    assert page.inner_text("#best-caption").endswith("the best of 2 methods")
    page.close()


def test_where_less_is_better_the_lowest_score_comes_first(browser, tmp_path):
    for method, ratio, answers in (("full", 1.0, "abcd"), ("knorm", 0.5, "abxx"), ("snapkv", 0.5, "abcx")):
        write_answers(tmp_path, "letters", method, ratio, answers, protocol=SCOPE, is_lower_better=True)
    assert main([str(tmp_path), "--out", str(tmp_path / "a.html")]) == 0
    page, _, _ = opened(browser, tmp_path / "a.html")
    assert [name.split("\n")[0] for name in rows(page)] == ["knorm", "snapkv", "full"]
    assert page.evaluate("onFront(group.cells, (cell) => 1 / cell.ratio).map(({method}) => method)") == ["knorm"]
    page.close()


TOO_WIDE = "(box => box.scrollWidth - box.clientWidth)(document.querySelector('.scroll'))"  # pixels of the table


def rows(page, place=1):
    return page.locator(f"#rows-table tbody tr:not(.more) td:nth-child({place})").all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [pytest.param(1280, "light", marks=pytest.mark.slow), (400, "dark")])
def test_the_page_works_in_a_browser(browser, page_file, data, width, scheme):
    page, said, asked = opened(browser, page_file, viewport={"width": width, "height": 900}, color_scheme=scheme)

    # First, which method: a line leads to its table.
    lines = page.locator("#choices button")
    assert not page.is_visible("#no-choice")
    assert lines.count() == len(
        {(each["regime"], each["protocol"]["ratio_of"]) for each in data["boards"] if each["choice"]}
    )
    lines.last.click()
    shown = next(
        each for each in data["boards"] if each["choice"] and each["choice"]["text"] in lines.last.inner_text()
    )
    assert page.input_value("#protocol") == shown["protocol_text"]
    assert len(rows(page)) == len(shown["cells"])
    methods = {cell["method"] for cell in shown["cells"]}
    assert page.locator("#best-names .series").count() == len({*shown["best"], "full"} & methods)

    # The lists lead from the regime over the task to the protocol; a table holds one protocol alone.
    page.select_option("#regime", "an image")
    page.select_option("#task", "tiny_textvqa")
    protocols = page.locator("#protocol option").all_inner_texts()
    assert len(protocols) == 2
    for protocol in protocols:
        page.select_option("#protocol", protocol)
        (board,) = [
            board for board in data["boards"] if (board["task"], board["protocol_text"]) == ("tiny_textvqa", protocol)
        ]
        assert len(rows(page)) == len(board["cells"])
        assert page.inner_text("#board-lead").startswith(
            f"first_token={board['protocol']['first_token']}, scope=prompt"
        )
        shown = page.locator("#plot-size .point").count()
        assert shown == len(board["cells"])
    assert page.is_visible("#board-warning") == bool(board["warning"])

    # The best stand first; other columns sort, too.
    scores = [float(text.split()[0]) for text in rows(page, 3)]
    assert scores == sorted(scores, reverse=True)
    page.click("#rows-table th:nth-child(1)")
    assert page.get_attribute("#rows-table th:nth-child(1)", "aria-sort") == "ascending"
    names = [text.split()[0] for text in rows(page)]
    assert names == sorted(names)

    # Filters: the full cache is shown next to every size; partial names work.
    page.select_option("#size", "0.2")
    assert {text.strip() for text in rows(page, 2)} == {"0.201", "1.000"}
    page.fill("#search", "SNAP ada")
    assert sorted(text.split()[0] for text in rows(page)) == ["adakv", "snapkv"]
    assert page.locator("#plot-time .point").count() == 2

    # A name opens what made the row.
    page.click("#rows-table .name:has-text('snapkv')")
    more = page.inner_text("#rows-table .more")
    (cell,) = [cell for cell in board["cells"] if (cell["method"], cell["size"]) == ("snapkv", "0.2")]
    assert cell["command"] in " ".join(more.split())
    assert f"torch {cell['versions']['torch']}" in more
    assert ("same as full" in more) == (width < 560)  # else it stands in the table
    assert page.evaluate(TOO_WIDE) <= 0
    page.click("#rows-table .name:has-text('snapkv')")
    assert page.locator("#rows-table .more").count() == 0

    # Two models in one table, and what a name holds is text.
    page.select_option("#regime", next(board["regime"] for board in data["boards"] if board["task"] == "letters"))
    page.fill("#search", "")
    assert page.locator("#rows-table tbody tr").count() == 6
    assert sum("<b>" in text for text in rows(page)) == 2
    page.select_option("#model", "org/two")
    assert [text.split()[-1] for text in rows(page)] == ["org/two"] * 3

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_WIDE) <= 0
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()
