"""Where half of the answers have one or two tokens and the first is computed on the whole cache, everything that shows
scores says so."""

import io
import json

import pytest
from rich.console import Console

from kvcompress.__main__ import main as kvcompress_main
from lmms_eval_plugins.report import metrics_command, table
from lmms_eval_plugins.report.groups import load_groups
from lmms_eval_plugins.report.html.data import page_data
from lmms_eval_plugins.report.short_answers import too_short
from tests.support.result_cells import write_answers

PROTOCOL = {"scope": "prompt", "ratio_of": "prompt", "first_token": "full", "options": {}}
OF_FULL = {**PROTOCOL, "scope": None, "ratio_of": None}
LINE = (
    "signs: the median answer has 1 token. With first_token=full the first token is computed on the whole cache, so "
    "such answers cannot show compression; with first_token=compressed they do."
)


def cell(tokens=1, kept=0.2, options=None, prompt=100, **protocol):
    efficiency = {"tokens_out": tokens, "tokens_in": prompt}
    return {
        "protocol": {**PROTOCOL, "options": options or {}, **protocol},
        "efficiency": {name: {"median": value} for name, value in efficiency.items()}
        | {"realised_ratio": {"mean": kept}},
    }


def of_server(**protocol):
    """A cell that a server answered: what is kept was not measured."""
    measured = cell(**protocol)
    del measured["efficiency"]["realised_ratio"]
    return measured


@pytest.mark.parametrize(
    ("of", "is_short"),
    [
        (cell(), True),
        (cell(tokens=2), True),
        (cell(tokens=2.5), False),
        (cell(first_token="compressed"), False),
        (cell(kept=1.0), False),
        (cell(scope=None, ratio_of=None, kept=1.0), False),  # the full cache
        (cell(scope=None, ratio_of=None, kept=1.0, options={"cache_implementation": "quantized"}), True),
        (cell(scope=None, ratio_of=None, kept=1.0, options={"cache_implementation": "think"}), True),
        (cell(ratio_of="vision"), True),  # a KV method that evicts vision tokens, after the prefill
        (cell(scope=None, ratio_of="vision"), False),  # a token method: the prefill itself has fewer
        (cell(options={"prefill_chunk": 32}), False),  # the last chunk sees what is left of the others
        (cell(options={"prefill_chunk": 100}), True),  # all prompts are one chunk
        (cell(options={"prefill_chunk": None}), True),
        (of_server(ratio=0.2), True),
        (of_server(ratio=1.0), False),
        ({"protocol": PROTOCOL, "efficiency": {}}, False),  # nothing was measured
    ],
)
def test_short_is_what_compresses_behind_the_first_token_and_has_no_second(of, is_short):
    assert too_short(of) is is_short


@pytest.fixture
def folder(tmp_path):
    write_answers(tmp_path, "signs", "full", 1.0, "abcd", tokens=1, protocol=OF_FULL)
    return write_answers(tmp_path, "signs", "snapkv", 0.2, "abxx", tokens=1, protocol=PROTOCOL)


def printed(folder):
    out = io.StringIO()
    files = table.report(folder, console=Console(file=out, width=100))
    return out.getvalue().splitlines(), files[0].read_text().splitlines()


def test_the_printed_table_and_its_file_say_it_in_one_line(folder):
    on_screen, in_file = printed(folder)
    assert on_screen.count(LINE) == 1
    assert in_file.count(table.markdown_text(LINE)) == 1


def test_nothing_is_said_of_the_full_cache_alone_nor_of_longer_answers(tmp_path):
    folder = write_answers(tmp_path, "signs", "full", 1.0, "abcd", tokens=1, protocol=OF_FULL)
    assert not any("median answer" in line for lines in printed(folder) for line in lines)
    folder = write_answers(tmp_path, "signs", "snapkv", 0.2, "abcd", tokens=3, protocol=PROTOCOL)
    assert not any("median answer" in line for lines in printed(folder) for line in lines)


def test_cells_are_named_where_others_of_the_table_show_compression(folder):
    root, compressed = folder.parents[1], {**PROTOCOL, "first_token": "compressed"}
    options = {"first_token": "compressed"}
    write_answers(root, "signs", "snapkv", 0.2, "axxx", tokens=1, options=options, protocol=compressed)
    write_answers(root, "signs", "snapkv", 0.5, "abcx", tokens=1, protocol=PROTOCOL)
    write_answers(root, "signs", "knorm", None, "axxx", tokens=2, budget=64, protocol=PROTOCOL)
    (line,) = [line for line in printed(folder)[0] if "median answer" in line]
    assert line.startswith(
        "signs: the median answer of knorm (budget 64), snapkv (0.5, 0.2) has at most 2 tokens. With "
    )


def test_metrics_say_it_as_text_and_as_json(folder, capsys):
    assert metrics_command.main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == LINE
    assert metrics_command.main([str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [LINE]


def test_the_page_and_its_tables_say_it(tmp_path):
    root = tmp_path / "results"
    for task, tokens in (("signs", 1), ("stories", 40)):
        for method, ratio, protocol in (("full", 1.0, OF_FULL), ("snapkv", 0.2, PROTOCOL)):
            write_answers(root, task, method, ratio, "abcd", tokens=tokens, protocol=protocol)
    assert [group["warning"] for group in page_data(load_groups(root))["groups"]] == [LINE, ""]
    assert kvcompress_main(["report", str(root)]) == 0
    assert (root / "report" / "tables.md").read_text().count("the median answer") == 1
    latex = (root / "report" / "tables.tex").read_text()
    assert latex.count("the median answer has 1 token. With first\\_token=full") == 1
