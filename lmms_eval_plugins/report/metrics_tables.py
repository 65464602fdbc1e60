"""Tables of the metrics of a grid, as a terminal shows them."""

import argparse
import math
import sys
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from ..cells.results import dumps
from .grid import GROUP, compare, curves, load_grid, overall
from .short_answers import warning
from .table import print_warning, score_scale


def show_metrics(flags: argparse.Namespace) -> None:
    """Print the metrics that are asked for. Raises UsageError or KVCompressError."""
    grid, left_out = load_grid(flags.folders, flags.metric, flags.filter)
    lines, summary = curves(grid, flags.points, flags.lowest), overall(grid)
    comparisons = pd.DataFrame()
    if flags.compare:
        comparisons = compare(grid, *flags.compare, flags.resamples, flags.seed)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    warnings = [line for _, group in grid.groupby(GROUP) if (line := warning(group))]
    if flags.json:
        frames = {"cells": grid.drop(columns="questions"), "curves": lines, "overall": summary, "compared": comparisons}
        records = {name: _records(frame) for name, frame in frames.items()}
        print(dumps({**records, "warnings": warnings}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)
    for table in terminal_tables(grid, lines, summary, comparisons):
        console.print(table)
    for line in warnings:
        print_warning(console, line)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for JSON, which has no NaN."""
    missing = frame.astype(object).where(frame.notna(), None)
    return missing.to_dict("records")


def terminal_tables(
    grid: pd.DataFrame, lines: pd.DataFrame, summary: pd.DataFrame, comparisons: pd.DataFrame
) -> list[Table]:
    """What `load_grid`, `curves`, `overall` and `compare` gave, formatted."""
    tables = []
    for key, group in grid.groupby(GROUP):
        tables.append(_cells_table(group))
        own = lines[(lines[GROUP] == list(key)).all(axis=1)] if len(lines) else lines
        if len(own):
            tables.append(_curves_table(own))
    if any(len(tasks) > 1 for tasks in summary.get("tasks", [])):
        tables.append(_overall_table(summary))
    if len(comparisons):
        tables.append(_comparisons_table(comparisons))
    return tables


def _cells_table(group: pd.DataFrame) -> Table:
    task, model, settings = group[GROUP].iloc[0]
    scale = score_scale(group)
    table = Table(title=f"{task}, {model}" + (f" ({settings})" if settings else ""))
    metric, against_full = group["metric"].iloc[0], ("of full", "loyalty", "speed-up")
    has_headroom = group["headroom"].notna().any()  # only where `random` and `hindsight` are in the grid
    columns = ["method", "ratio kept", metric, *(["headroom"] if has_headroom else []), *against_full]
    for column in (*columns, "answers/s", "tokens/correct"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in group.itertuples():
        values = [_percent(row.relative) + " %", _percent(row.loyalty) + " %", f"{row.speed_up:.2f}x"]
        values += [_number(row.answers_per_s), _number(row.tokens_per_correct)]
        if has_headroom:
            interval = f"[{_percent(row.headroom_low, 0)}, {_percent(row.headroom_high, 0)}] %"
            values.insert(0, "-" if pd.isna(row.headroom) else f"{_percent(row.headroom, 0)} {interval}")
        table.add_row(row.series, row.size, f"{scale * row.score:.1f}", *values)
    return table


def _curves_table(lines: pd.DataFrame) -> Table:
    first = lines.iloc[0]
    table = Table(caption=f"Area: mean of score / full score from ratio {first['from']:g} to 1, logarithmic.")
    table.add_column("method")
    table.add_column("area", justify="right")
    table.add_column(f"smallest ratio within {first['points']:g} points", justify="right")
    table.add_column(f"answers/s within {first['points']:g} points", justify="right")
    for row in lines.itertuples():
        speed = _number(row.answers_per_s) + f" (full {_number(row.full_answers_per_s)})"
        table.add_row(row.series, _percent(row.area) + " %", f"{row.smallest:g}", speed)
    return table


def _overall_table(summary: pd.DataFrame) -> Table:
    table = Table(title="All tasks", caption="OP: root mean square of score / full score; OG: its deviation / mean.")
    for column in ("model", "method", "ratio kept", "tasks", "OP", "mean", "min", "OG", "OL", "min", "OE", "min"):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for row in summary.itertuples():
        shares = [_percent(value) for value in (row.op, row.mean, row.min, row.og, row.ol, row.ol_min)]
        name = row.model + (f" ({row.settings})" if row.settings else "")
        speed_ups = [f"{row.oe:.2f}x", f"{row.oe_min:.2f}x"]
        table.add_row(name, row.series, row.size, str(len(row.tasks)), *shares, *speed_ups)
    return table


def _comparisons_table(comparisons: pd.DataFrame) -> Table:
    table = Table(title="A - B on the same questions, in units of the score; paired bootstrap")
    for column in ("task", "A", "B", "questions", "difference", "95 % interval", "p"):
        table.add_column(column, justify="left" if column in ("task", "A", "B") else "right")
    for row in comparisons.itertuples():
        interval = f"[{row.low:+.3f}, {row.high:+.3f}]"
        values = [str(row.questions), f"{row.difference:+.3f}", interval, f"{row.p_value:.4f}"]
        table.add_row(row.task, row.a, row.b, *values)
    return table


def _number(value: float | None) -> str:
    return "-" if pd.isna(value) else f"{value:.1f}"


def _percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}"
