"""The figure of all methods reads the tables that the benchmark writes."""

import numpy as np
import pytest

from benchmarks.driver import RESULTS
from benchmarks.method_tasks import TASKS
from benchmarks.methods_figure import TITLES, Panel, main


def test_the_figure_names_every_task():
    assert TITLES.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TITLES)
def test_every_row_of_a_table_is_in_its_panel(name):
    panel = Panel.of((RESULTS / f"method_table_{name}.md").read_text(encoding="utf-8"))
    assert panel.ratios == ["0.5", "0.2", "0.1", "0.05"]
    assert len(panel.rows) > 35
    assert {"random", "hindsight", "snapkv"} <= panel.rows.keys()
    assert "full" not in panel.rows


def test_a_cell_without_an_answer_is_empty_and_a_share_in_brackets_is_noted():
    table = (
        "# Task\n\n## query-aware\n\n| method | 0.5 | 0.2 | mean | headroom |\n| --- | ---: | ---: | ---: | ---: |\n"
        "| **full** |  |  | 99 [97, 100] |  |\n| knorm (20 questions) | 12 [3, 20] \u25bc |  |  |  |\n"
        "| fastv | 91 [85, 96] (0.723) | 3 [0, 7] | 47.0 |  |\n\n## other\n\n| tova | 1 | 2 | 3 |  |\n"
    )
    panel = Panel.of(table)
    np.testing.assert_equal(panel.rows, {"knorm": [12, np.nan], "fastv": [91, 3]})
    assert panel.keeps_more == {"fastv"}


def test_the_figure_is_drawn(tmp_path):
    main(["--out", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
