"""The line that says how far a grid is."""

import io
import sys
import time

import pytest

from lmms_eval_plugins.cells import progress
from lmms_eval_plugins.cells.progress import Grid


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time passes when `clock.now` is set."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    monkeypatch.setattr(time, "time", lambda: Clock.now)
    monkeypatch.setattr("tqdm.std.time", lambda: Clock.now)
    return Clock


def run_cells(clock, questions: list[int], seconds: float, **settings) -> None:
    """Answer every question of every cell, each in `seconds`."""
    grid = Grid(questions)
    for cell, total in enumerate(questions):
        grid.begin(cell, f"knorm-0.{cell + 1}")
        with grid.bar(total, **settings) as bar:
            for _ in range(total):
                clock.now += seconds
                bar.update()


def test_a_log_gets_a_whole_line_now_and_then_and_no_control_characters(clock, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 30)
    run_cells(clock, [20, 40], seconds=2)
    assert capsys.readouterr().err.splitlines() == [
        "cell 1/2 knorm-0.1 · 15/20 · 0.5 samples/s · 00:10 left · grid 0:01:30 left",
        "cell 1/2 knorm-0.1 · 20/20 · 0.5 samples/s · 00:00 left · grid 0:01:20 left",
        "cell 2/2 knorm-0.2 · 15/40 · 0.5 samples/s · 00:50 left · grid 0:00:50 left",
        "cell 2/2 knorm-0.2 · 30/40 · 0.5 samples/s · 00:20 left · grid 0:00:20 left",
        "cell 2/2 knorm-0.2 · 40/40 · 0.5 samples/s · 00:00 left · grid 0:00:00 left",
    ]


def test_a_terminal_gets_one_line_per_cell_written_over(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    run_cells(clock, [2, 2], seconds=1)
    written = sys.stderr.getvalue()
    assert written.count("\n") == 2
    assert "\rcell 1/2 knorm-0.1 · 0/2 · ? samples/s · ? left · grid ? left" in written
    assert "\rcell 2/2 knorm-0.2 · 1/2 · 1.0 samples/s · 00:01 left · grid 0:00:01 left" in written


def test_time_left_counts_what_happens_between_answers(clock):
    grid = Grid([10, 10])
    clock.now = 30.0
    grid.begin(1, "knorm")
    assert grid.left(0.0).total_seconds() == 30
    assert grid.left(0.5).total_seconds() == 10


def test_cells_that_are_left_out_took_no_time_and_take_none(clock):
    grid = Grid([10, 10, 10])
    grid.skip(0)
    clock.now = 30.0
    grid.begin(2, "knorm")
    assert grid.left(0.0).total_seconds() == 30
    assert grid.left(0.5).total_seconds() == 10


def test_other_ranks_are_silent(clock, capsys):
    run_cells(clock, [40], seconds=2, disable=True)
    assert capsys.readouterr().err == ""
