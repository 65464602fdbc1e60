"""Scores by two columns of a task's questions: `python -m lmms_eval_plugins.heatmap results/<task>/<model>`.

For the tasks of `python -m lmms_eval_plugins.long_pack` these are the length of the prompt and the needle's depth; any
columns of a task will do. Beside the cells it writes `heatmap-<x>-<y>[-...].png`, a panel for each method and ratio,
and the same numbers as `.csv`; it prints them by each column alone. Only cells with the same settings share a figure.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written; no display is needed

import matplotlib.pyplot as plt
import pandas as pd
from rich.console import Console
from rich.table import Table

from kvcompress.errors import unknown_name
from kvcompress.files import check_output, replacing

from ..cells.command_line import Parser
from ..cells.errors import EvaluationFailed, UsageError, exit_code, leave_out
from ..cells.flag_types import folder, label, shown
from ..cells.results import RESULTS_FILE, DamagedFile, exact, read_cell
from .headline import by_question, headline
from .plots import plain
from .table import cell_row

MOST_VALUES = 40  # of a column: more would not be legible


def question_rows(
    root: Path, columns: Sequence[str], metric: str | None = None, metric_filter: str | None = None
) -> pd.DataFrame:
    """One row per question of every finished cell under `root`: `settings`, `series`, `size`, `kept`, `metric`, `score`
    and the columns of the task's documents that are named, None where a question has none.

    Raises EvaluationFailed where there is no finished cell with a score per question; KVCompressError for a column that
    the task does not have.
    """
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    for file in sorted(root.glob(f"[!.]*/{RESULTS_FILE}")):
        try:
            cell, samples = read_cell(file.parent)
        except (DamagedFile, FileNotFoundError) as error:
            leave_out(file.parent, error)
            continue
        found = headline(cell, metric, metric_filter)
        if found is None:
            leave_out(file.parent, "it has no such score")
            continue
        summary = cell_row(cell, metric, metric_filter)
        size = exact(summary["ratio"]) if summary["ratio"] is not None else f"budget={summary['budget']}"
        of_cell = {key: summary[key] for key in ("settings", "settings_text", "series", "metric")}
        of_cell |= {"size": size, "kept": summary["realised"] if summary["ratio"] is None else summary["ratio"]}
        for sample, score in by_question(cell, samples, found):
            document = sample.get("doc") or {}
            known |= {key for key, value in document.items() if isinstance(value, str | int | float)}
            if not math.isnan(score):
                rows.append({**of_cell, "score": score, **{name: document.get(name) for name in columns}})
    if not rows:
        raise EvaluationFailed(f"no finished cell with a score per question under {str(root)!r}")
    for name in columns:
        if name not in known:
            raise unknown_name("the task's questions have no column", name, known)
    return pd.DataFrame(rows)


def heatmap_table(rows: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Mean score and number of questions for each cell and each value of the two columns."""
    by = ["series", "size", "kept", y, x]
    grouped = rows.dropna(subset=[x, y]).groupby(by, sort=True)["score"]
    return grouped.agg(score="mean", questions="count").reset_index()


def draw(table: pd.DataFrame, x: str, y: str, title: str, path: Path) -> None:
    """A panel for each cell: a row for each method, the full cache first, a column for each ratio or budget."""
    order = table.groupby("series")["kept"].max().sort_values(ascending=False, kind="stable").index
    panels = {
        series: list(dict.fromkeys(cells.sort_values("kept", ascending=False)["size"]))
        for series, cells in ((series, table[table["series"] == series]) for series in order)
    }
    xs, ys = (sorted(table[name].unique()) for name in (x, y))
    columns = max(map(len, panels.values()))
    width, height = max(2.6, 0.62 * len(xs) + 1), max(1.9, 0.38 * len(ys) + 1)
    figure, axes = plt.subplots(
        len(panels), columns, figsize=(width * columns + 1, height * len(panels) + 0.6), squeeze=False
    )
    figure.set_layout_engine("constrained")
    scale = 100 if table["score"].between(0, 1).all() else 1
    limits = (0, 100) if scale == 100 else (table["score"].min(), table["score"].max())
    image = None
    for row, (series, sizes) in zip(axes, panels.items(), strict=True):
        for place, axis in enumerate(row):
            if place >= len(sizes):
                axis.set_axis_off()
                continue
            cells = table[(table["series"] == series) & (table["size"] == sizes[place])]
            grid = scale * cells.pivot(index=y, columns=x, values="score").reindex(index=ys, columns=xs)
            image = axis.imshow(grid, vmin=limits[0], vmax=limits[1], cmap="viridis", aspect="auto")
            _write_values(axis, grid, limits)
            axis.set_xticks(range(len(xs)), [_short(value) for value in xs], fontsize=8)
            axis.set_yticks(range(len(ys)), [_short(value) for value in ys], fontsize=8)
            axis.set_title(plain(series if series == "full" else f"{series} {sizes[place]}"), fontsize=8)
            axis.set_xlabel(plain(x), fontsize=8)
            axis.set_ylabel(plain(y), fontsize=8)
    figure.suptitle(plain(title), fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.7)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")
    plt.close(figure)


def _write_values(axis: plt.Axes, grid: pd.DataFrame, limits: tuple[float, float]) -> None:
    middle = sum(limits) / 2
    for row, values in enumerate(grid.to_numpy()):
        for column, value in enumerate(values):
            if not math.isnan(value):
                color = "black" if value > middle else "white"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def by_column(rows: pd.DataFrame, column: str) -> Table:
    """The mean score of each cell at each value of one column, and over all questions."""
    scale = 100 if rows["score"].between(0, 1).all() else 1
    values = sorted(rows[column].dropna().unique())
    table = Table(title=f"{rows['metric'].iloc[0]} by {column}")
    for name in ("method", "ratio kept", *map(_short, values), "all"):
        table.add_column(name, justify="left" if name == "method" else "right")
    groups = rows.groupby(["series", "kept", "size"], sort=False)["score"]
    order = sorted(groups.groups, key=lambda key: (key[0] != "full", key[0], -key[1]))
    for key in order:
        own = rows[(rows["series"] == key[0]) & (rows["size"] == key[2])]
        means = [own[own[column] == value]["score"].mean() for value in values]
        cells = ["-" if math.isnan(mean) else f"{scale * mean:.1f}" for mean in (*means, own["score"].mean())]
        table.add_row(key[0], key[2], *cells)
    return table


def condition(text: str) -> tuple[str, str]:
    """`kind=counting` -> ("kind", "counting")."""
    name, equals, value = text.partition("=")
    if not (equals and name and value and text.isprintable()):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not COLUMN=VALUE")
    return name, value


def parser() -> argparse.ArgumentParser:
    this = Parser(
        prog="python -m lmms_eval_plugins.heatmap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = this.add_argument
    add("folder", type=folder, help="results/<task>/<model>")
    add("--x", type=label, default="length", help="column of the questions, from left to right (length)")
    add("--y", type=label, default="depth", help="column of the questions, from top to bottom (depth)")
    add("--where", type=condition, metavar="COLUMN=VALUE", help="only these questions, e.g. kind=counting")
    add("--metric", type=label, help="of the task, in place of its main one")
    add("--filter", type=label, help="of the task's answers, in place of the first one")
    return this


def command(argv: list[str]) -> None:
    """Write figure and numbers. Raises UsageError, KVCompressError or EvaluationFailed."""
    flags = parser().parse_args(argv)
    check_output(flags.folder)
    columns = dict.fromkeys([flags.x, flags.y, *([flags.where[0]] if flags.where else [])])
    rows = question_rows(flags.folder, list(columns), flags.metric, flags.filter)
    if flags.where:
        column, value = flags.where
        rows = rows[rows[column].map(lambda own: own is not None and _short(own) == value)]
        if rows.empty:
            raise UsageError(f"--where {column}={shown(value)}: no question has that")
    for column in (flags.x, flags.y):
        if (count := rows[column].nunique()) > MOST_VALUES:
            raise UsageError(f"column {column!r} has {count} different values: at most {MOST_VALUES} are shown")
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)
    for settings, own in rows.groupby("settings"):
        for column in dict.fromkeys([flags.x, flags.y]):
            console.print(by_column(own, column))
        table = heatmap_table(own, flags.x, flags.y)
        if missing := int(own[[flags.x, flags.y]].isna().any(axis=1).sum()):
            console.print(f"{missing} of {len(own)} answers have no {flags.x} or no {flags.y}: not in the figure")
        if table.empty:
            continue
        parts = ["heatmap", flags.x, flags.y, *(flags.where or ()), settings]
        name = re.sub(r"[^\w.,=+@-]", "_", "-".join(filter(None, parts)))
        path = flags.folder / f"{name}.png"
        title = f"{flags.folder.parent.name}, {flags.folder.name}: {own['metric'].iloc[0]}"
        draw(table, flags.x, flags.y, title, path)
        with replacing(path.with_suffix(".csv")) as draft:
            table.to_csv(draft, index=False)
        for file in (path, path.with_suffix(".csv")):
            console.print(f"written: {file}", soft_wrap=True, highlight=False)


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(command, argv, "files")


if __name__ == "__main__":
    sys.exit(main())
