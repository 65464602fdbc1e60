"""Show the progress of a grid of cells in one line, for a terminal or for a log.

cell 3/13 snapkv-0.2 · 120/250 · 14.2 samples/s · 00:09 left · grid 0:02:10 left
"""

import io
import sys
import time
from datetime import timedelta
from typing import Any

from tqdm import tqdm

LOG_INTERVAL_S = 30


class Grid:
    """Tracks the cells of a grid, evaluated one by one; `bar` serves as a `KVCompressLM.progress_bar`.

    The time left is that of the remaining questions at the rate so far, including everything between answers.
    """

    def __init__(self, questions: list[int]):
        """`questions`: the number of questions of each cell, all of them or this process's share."""
        self.questions, self.finished, self.name = questions, 0, ""
        self.start = time.monotonic()

    def begin(self, cell: int, name: str) -> None:
        """Start cell number `cell`, counted from 0."""
        self.finished, self.name = cell, name

    def skip(self, cell: int) -> None:
        """Take the questions of a cell that is not evaluated out of the count."""
        self.questions[cell] = 0

    def left(self, part: float) -> timedelta | None:
        """Return the time until all cells are done when `part` (0 to 1) of the current one is; None at the start."""
        done = sum(self.questions[: self.finished]) + part * self.questions[self.finished]
        if not done:
            return None
        return timedelta(seconds=round((time.monotonic() - self.start) * (sum(self.questions) / done - 1)))

    def bar(self, total: int, disable: bool = False) -> "Bar":
        """Return the current cell's progress bar: one updated line on a terminal, otherwise a line now and then."""
        is_terminal = sys.stderr.isatty()
        kind, settings = (Bar, {}) if is_terminal else (Lines, {"file": io.StringIO(), "mininterval": LOG_INTERVAL_S})
        cell = f"cell {self.finished + 1}/{len(self.questions)} {self.name}"
        return kind(self, total=total, desc=cell, disable=disable, **settings)


class Bar(tqdm):
    FORMAT = "{desc} · {n_fmt}/{total_fmt} · {speed} samples/s · {remaining} left · grid {grid_left} left"

    def __init__(self, grid: Grid, **settings: Any):
        self.grid = grid
        super().__init__(bar_format=self.FORMAT, miniters=1, dynamic_ncols=True, **settings)

    @property
    def format_dict(self) -> dict[str, Any]:
        known = super().format_dict
        left = self.grid.left(known["n"] / known["total"] if known["total"] else 1.0)
        return {
            **known,
            "prefix": known["prefix"].removesuffix(": "),  # which tqdm adds
            "speed": f"{known['n'] / known['elapsed']:.1f}" if known["n"] else "?",
            "grid_left": "?" if left is None else left,
        }


class Lines(Bar):
    """Progress for a log: no control characters, a line every LOG_INTERVAL_S seconds and one at the end."""

    shown = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self.n > self.shown:
            print(str(self), file=sys.stderr, flush=True)
        self.shown = self.n
        return True
