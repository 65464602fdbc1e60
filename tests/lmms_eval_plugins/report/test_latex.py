"""The tables for papers: well formed, with the best of a column in bold."""

import re

import pytest

from kvcompress.__main__ import main
from lmms_eval_plugins.report.latex import environment, escaped
from tests.support.result_cells import write_answers


@pytest.fixture
def results(tmp_path):
    """Of four questions; fastv keeps far more than is asked, and tova answered two of them."""
    for method, ratio, answers, realised in (
        ("full", 1.0, "abcd", None),
        ("hindsight", 0.5, "abcd", None),
        ("fastv", 0.5, "abcd", 0.72),
        ("snapkv", 0.5, "abcx", None),
        ("knorm", 0.5, "xbcd", None),
        ("random", 0.5, "axxx", None),
        ("snapkv", 0.2, "abxx", None),
    ):
        write_answers(tmp_path, "signs_val", method, ratio, answers, realised=realised)
    write_answers(tmp_path, "signs_val", "knorm", None, "axxx", budget=64)
    write_answers(tmp_path, "signs_val", "tova", 0.5, "ab", truth="ab")
    return tmp_path


def written(results):
    assert main(["report", str(results)]) == 0
    return (results / "report" / "tables.tex").read_text()


def rows_of(text):
    """Header and rows of each table."""
    for columns, body in re.findall(r"\\begin\{(?:tabular|longtable)\}\{(l?r*)\}(.*?)\\end\{", text, re.DOTALL):
        lines = [line.removesuffix(r" \\") for line in body.splitlines() if line.endswith(r" \\")]
        yield columns, [re.split(r"(?<!\\) & ", line) for line in lines if not line.startswith("\\caption")]


def test_a_score_is_where_its_method_and_its_ratio_meet_and_the_best_is_bold(results):
    *_, (columns, (header, full, *rows)) = rows_of(written(results))
    assert (columns, header) == ("lrrr", ["method", "0.5", "0.2", "budget 64"])
    assert full == ["full cache", r"\multicolumn{3}{c}{100.0 $\pm$ 10.0}"]
    assert {row[0]: row[1:] for row in rows} == {
        "fastv": [r"100.0 $\pm$ 10.0 (0.720)", "", ""],  # not the same share: not the best
        "hindsight": [r"100.0 $\pm$ 10.0", "", ""],  # it knows the answer
        "knorm": [r"\textbf{75.0 $\pm$ 10.0}", "", r"\textbf{25.0 $\pm$ 10.0}"],
        "random": [r"25.0 $\pm$ 10.0", "", ""],
        "snapkv": [r"\textbf{75.0 $\pm$ 10.0}", r"\textbf{50.0 $\pm$ 10.0}", ""],
        "tova": [r"100.0 $\pm$ 10.0", "", ""],  # of fewer questions
    }


def test_the_full_cache_alone_has_a_row_and_nothing_bold(tmp_path):
    write_answers(tmp_path, "signs_val", "full", 1.0, "abcd")
    text = written(tmp_path)
    check(text)
    assert "textbf" not in text
    assert [row[0] for _, (_, *rows) in rows_of(text) for row in rows] == ["full"]


def check(text):
    """Environments and braces are balanced, every row has the columns that are declared, rules are booktabs'."""
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        assert kind == "begin" or opened.pop() == name
        if kind == "begin":
            opened.append(name)
    assert opened == []
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    for columns, rows in rows_of(text):
        spans = [[int(number) for number in re.findall(r"multicolumn\{(\d+)\}", " ".join(row))] for row in rows]
        assert {len(row) + sum(wide) - len(wide) for row, wide in zip(rows, spans, strict=True)} == {len(columns)}
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert rule in text
    assert not re.search(r"(?<!\\)[#_%^~](?!.*needs)", "\n".join(text.splitlines()[1:]))


def test_the_file_is_well_formed(results):
    text = written(results)
    check(text)
    assert text.startswith("% needs \\usepackage{booktabs,longtable}\n")
    assert "signs\\_val" in text
    assert "±" not in text


def test_many_rows_go_over_pages_with_the_header_on_each():
    rows = [[f"method-{n}", "50.0"] for n in range(58)]
    text = environment(["method", "0.5"], rows, "58 methods_of a paper", [r"full cache & \multicolumn{1}{c}{99.0}"])
    check(text)
    assert text.count("method & 0.5") == 2
    assert text.index("\\endfirsthead") < text.index("\\endhead") < text.index("full cache")
    assert text.count("\\caption") == 1


def test_a_rule_parts_the_rows_above_from_the_others_where_there_are_both():
    row, above = ["snapkv", "50.0"], "full cache & 99.0"
    for rows, first, rules in (([row], [above], 2), ([row], [], 1), ([], [above], 1)):
        assert environment(["method", "0.5"], rows, "caption", first).count("\\midrule") == rules


def test_what_has_a_meaning_to_latex_is_escaped():
    assert escaped("50 % & x_y {z} #1 $5 ± 2") == r"50 \% \& x\_y \{z\} \#1 \$5 $\pm$ 2"
    assert escaped("a\\b ^ ~ <c>|\nd") == (
        r"a\textbackslash{}b \textasciicircum{} \textasciitilde{} \textless{}c\textgreater{}\textbar{} d"
    )
