"""Numbers are rounded as the page's script rounds them, and say what was kept."""

import shutil
import subprocess

import pytest

from lmms_eval_plugins.report.numbers import fixed, kept, near, share

HALVES = [(100 * 9 / 16, 1), (0.125, 2), (2.5, 0), (-2.5, 0), (1.005, 2), (0.45, 1), (8.345, 2), (1500, 1), (1e-9, 3)]
ROUNDED = ["56.3", "0.13", "3", "-3", "1.00", "0.5", "8.35", "1500.0", "0.000"]


def test_a_half_is_rounded_away_from_zero():
    assert [fixed(value, digits) for value, digits in HALVES] == ROUNDED


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_it_is_what_javascript_says():
    script = "console.log([" + ",".join(f"({value!r}).toFixed({digits})" for value, digits in HALVES) + "].join(' '))"
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout.split()
    assert said == ROUNDED


def test_a_share_has_three_digits_that_count():
    assert [share(value) for value in (1, 0.5, 0.2009, 0.05, 0.0125, 0.00123, 0)] == [
        "1.000", "0.500", "0.201", "0.0500", "0.0125", "0.00123", "0.000",
    ]  # fmt: skip


def test_what_was_asked_is_in_brackets_where_it_is_not_what_was_kept():
    assert kept(0.2009, 0.2) == "0.201"
    assert kept(0.165, 0.1) == "0.165 (0.1)"
    assert kept(0.168, None, 64) == "0.168 (budget 64)"
    assert kept(None, 0.1) == "- (0.1)"
    assert near(None, 0.1)
    assert not near(0.165, 0.1)
