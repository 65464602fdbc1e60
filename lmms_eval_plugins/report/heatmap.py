"""Draw scores by two columns of a task's questions."""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from kvcompress.errors import unknown_name
from kvcompress.files import check_output, replacing
from kvcompress.flag_types import shown

from ..cells.errors import EvaluationFailed, UsageError, leave_out
from . import terminal
from .appearance import score_scale, short_names
from .groups import read_cells
from .headline import by_question, headline, why_none
from .numbers import fixed, kept
from .plots import plain, wrapped
from .table import KEPT, sweep_frame
from .terminal import fitted

MOST_VALUES = 40  # of a column: more would not be legible
OF_CELL = ("settings", "method", "options", "series", "metric", "size", "kept")
PANELS = 6  # per row of the figure, unless one method has more
FEW = 5  # up to this many methods, each has its own row
COLUMN = 0.5  # inches
TICK = 7  # points of the text beside an axis
LONGEST = 30  # characters of a value beside an axis


def named(column: str) -> str:
    """Return the name of a question's column; `question.size` if a cell has one of the same name."""
    return f"question.{column}" if column in (*OF_CELL, "score", "questions") else column


def question_rows(
    root: Path, columns: Sequence[str], metric: str | None = None, metric_filter: str | None = None
) -> pd.DataFrame:
    """Return one row per question of every finished cell in `root`: `settings`, `series`, `size`, `kept`, `metric`,
    `score` and the requested columns of the task's documents (`named`), None if a question has no text or number there.

    Raises EvaluationFailed if no finished cell has a score per question; KVCompressError for a column that the task
    does not have.
    """
    cells, damaged = read_cells(root, directly=True)
    for folder, error in damaged.items():
        leave_out(folder, error)
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    for cell in cells:
        found = headline(cell, metric, metric_filter)
        if found is None:
            leave_out(cell["folder"], f"it has {why_none(cell, metric, metric_filter)}")
            continue
        summary = sweep_frame([cell], metric, metric_filter).iloc[0]
        of_cell = {name: summary[name] for name in OF_CELL} | {"size": summary["asked"].replace(" ", "=")}
        for sample, score in by_question(cell, cell["samples"], found):
            document = sample.get("doc") or {}
            values = {key: value for key, value in document.items() if isinstance(value, str | int | float)}
            known |= values.keys()
            if not math.isnan(score):
                rows.append({**of_cell, "score": score, **{named(name): values.get(name) for name in columns}})
    if not rows:
        raise EvaluationFailed(f"no finished cell with a score per question under {str(root)!r}")
    for name in columns:
        if name not in known:
            raise unknown_name("the task's questions have no column", name, known)
    return pd.DataFrame(rows)


def heatmap_table(rows: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Return mean score and number of questions for each cell and each pair of values of the two columns."""
    by = ["series", "size", "kept", y, x]
    grouped = rows.dropna(subset=[x, y]).groupby(by, sort=True, dropna=False)["score"]
    return grouped.agg(score="mean", questions="count").reset_index()


def draw(table: pd.DataFrame, x: str, y: str, title: str, metric: str, scale: int, path: Path) -> None:
    """Draw a panel for each cell: the full cache first, and the panels of a method in a row, the largest share kept
    first. With more than FEW methods, several share a row."""
    order = table.groupby("series")["kept"].max().sort_values(ascending=False, kind="stable").index
    sizes = {
        series: list(dict.fromkeys(cells.sort_values("kept", ascending=False)["size"]))
        for series, cells in ((series, table[table["series"] == series]) for series in order)
    }
    xs, ys = (_ordered(table[name].unique()) for name in (x, y))
    most = max(map(len, sizes.values()))
    beside = max(1, min(len(sizes), PANELS // most)) if most == 1 or len(sizes) > FEW else 1  # methods in a row
    below, left = ([_label(value) for value in values] for values in (xs, ys))
    under, aside = (0.6 * TICK / 72 * max(map(len, labels)) for labels in (below, left))  # inches of the longest
    turned = under > COLUMN
    width = max(2.2, COLUMN * len(xs) + 0.6) + max(0, aside - 0.3)
    height = max(1.7, 0.3 * len(ys) + 0.9) + turned * under
    names = {
        key: wrapped(key[0] if key[0] == "full" else f"{key[0]} {_kept(cells)}", width - 0.5, 8)
        for key, cells in table.groupby(["series", "size"])
    }
    height += 0.14 * max(name.count("\n") for name in names.values())
    shape = -(-len(sizes) // beside), beside * most
    title = wrapped(title, width * shape[1] + 1.2, 10)
    figsize = (width * shape[1] + 1.2, height * shape[0] + 0.5 + 0.17 * title.count("\n"))
    figure = Figure(figsize=figsize, layout="constrained")
    axes = figure.subplots(*shape, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    limits = (0, 100) if scale == 100 else (table["score"].min(), table["score"].max())
    image = None
    for number, (series, of_series) in enumerate(sizes.items()):
        for place, size in enumerate(of_series):
            axis = axes[number // beside, number % beside * most + place]
            axis.set_axis_on()
            cells = table[(table["series"] == series) & (table["size"] == size)]
            grid = scale * cells.pivot(index=y, columns=x, values="score").reindex(index=ys, columns=xs)
            image = axis.imshow(grid, vmin=limits[0], vmax=limits[1], cmap="viridis", aspect="auto")
            _write_values(axis, grid, limits)
            axis.set_xticks(range(len(xs)), below, fontsize=TICK, rotation=90 if turned else 0)
            axis.set_yticks(range(len(ys)), left, fontsize=TICK)
            axis.set_xlabel(wrapped(x, width, TICK), fontsize=TICK, labelpad=2)
            if axis is axes[number // beside, 0]:
                axis.set_ylabel(wrapped(y, height, TICK), fontsize=TICK)
            axis.set_title(names[series, size], fontsize=8)
    figure.suptitle(title, fontsize=10)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 4 / figsize[1]), aspect=15, anchor=(0.0, 1.0))
    bar.set_label(wrapped(metric, min(4.0, 0.5 * figsize[1]), 9) + (" (%)" if scale == 100 else ""), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120, format="png")


def _kept(cells: pd.DataFrame) -> str:
    """Return what a cell kept, formatted as in every table."""
    realised, size = cells["kept"].iloc[0], cells["size"].iloc[0]
    budget = size.removeprefix("budget=")
    return kept(realised, float(size), None) if budget == size else kept(realised, None, float(budget))


def _write_values(axis: Axes, grid: pd.DataFrame, limits: tuple[float, float]) -> None:
    middle, digits = sum(limits) / 2, 0 if limits[1] >= 10 else 1
    for row, values in enumerate(grid.to_numpy()):
        for column, value in enumerate(values):
            if not math.isnan(value):
                color = "black" if value > middle else "white"
                text = fixed(value, digits)
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color=color)


def _short(value: Any) -> str:
    is_fraction = isinstance(value, float) and not value.is_integer()
    return f"{value:g}" if is_fraction else str(int(value) if isinstance(value, float) else value)


def _label(value: Any) -> str:
    """Return a value as it stands beside an axis."""
    text = " ".join(_short(value).split())
    return plain(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Sort values of a column, numbers before text."""
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def by_column(rows: pd.DataFrame, column: str, width: int, elsewhere: str) -> Table:
    """Return a table of each cell's mean score at each value of one column, and over all questions.

    Args:
        width: columns of the terminal.
        elsewhere: the file that holds what does not fit.
    """
    scale = score_scale(rows)
    values = _ordered(rows[column].dropna().unique())
    cells = rows.drop_duplicates(["series", "size"]).sort_values(["series", "kept"], ascending=[True, False])
    cells = cells.sort_values("series", key=lambda names: names != "full", kind="stable")
    names, shared = short_names(cells)
    title = "\n".join(filter(None, [f"{rows['metric'].iloc[0]} by {column}", shared]))
    header, lines = ["method", KEPT, *map(_short, values), "all"], []
    for name, (series, size) in zip(names, zip(cells["series"], cells["size"], strict=True), strict=True):
        own = rows[(rows["series"] == series) & (rows["size"] == size)]
        means = [own[own[column] == value]["score"].mean() for value in values]
        shown = ["-" if math.isnan(mean) else fixed(scale * mean, 1) for mean in (*means, own["score"].mean())]
        lines.append([name, _kept(own), *shown])
    middle = sorted(header[2:-1], key=lambda value: abs(header.index(value) - len(header) / 2))
    return fitted(width, header, lines, title, droppable=middle, elsewhere=elsewhere)


def write(flags: argparse.Namespace) -> None:
    """Write the figures and their numbers. Raises UsageError, KVCompressError or EvaluationFailed."""
    check_output(flags.folder)
    columns = dict.fromkeys([flags.x, flags.y, *([flags.where[0]] if flags.where else [])])
    if flags.x == flags.y:
        raise UsageError(f"--x and --y are both {shown(flags.x)}")
    rows = question_rows(flags.folder, list(columns), flags.metric, flags.filter)
    if flags.where:
        column, value = flags.where
        rows = rows[rows[named(column)].map(lambda own: own is not None and _short(own) == value)]
        if rows.empty:
            raise UsageError(f"--where {column}={shown(value)}: no question has this value")
    x, y = named(flags.x), named(flags.y)
    for column in (x, y):
        if (count := rows[column].nunique()) > MOST_VALUES:
            raise UsageError(f"column {column!r} has {count} different values: at most {MOST_VALUES} can be shown")
    console = terminal.console()
    for settings, own in rows.groupby("settings"):
        parts = ["heatmap", flags.x, flags.y, *(flags.where or ()), settings]
        name = re.sub(r"[^\w.,=+@-]", "_", "-".join(filter(None, parts)))
        for column in (x, y):
            console.print(by_column(own, column, console.width, f"{name}.csv"))
        table = heatmap_table(own, x, y)
        if missing := int(own[[x, y]].isna().any(axis=1).sum()):
            console.print(f"{missing} of {len(own)} answers lack {x} or {y} and are not in the figure")
        if table.empty:
            continue
        path = flags.folder / f"{name}.png"
        names, shared = short_names(own)
        title = f"{flags.folder.parent.name}, {flags.folder.name}" + (f": {shared}" if shared else "")
        short = table.assign(series=table["series"].map(dict(zip(own["series"], names, strict=True))))
        draw(short, x, y, title, own["metric"].iloc[0], score_scale(own), path)
        with replacing(path.with_suffix(".csv")) as draft:
            table.to_csv(draft, index=False)
        for file in (path, path.with_suffix(".csv")):
            console.print(f"written: {file}", soft_wrap=True, highlight=False)
