"""Terminal tables of a grid's metrics."""

import argparse
import sys
from typing import Any

import pandas as pd
from rich.table import Table

from ..cells.results import dumps
from . import terminal
from .against import columns, explanation
from .appearance import score_scale, short_names
from .gate import answered_blind, gate_lines
from .grid import GROUP, curves, load_grid, overall, paired_tests
from .numbers import fixed, kept, share, text_of
from .short_answers import warning
from .table import KEPT, print_warning, title_of
from .terminal import fitted

# Columns that a narrow terminal omits, the least important first.
DROPPABLE = ("tokens/correct", "answers/s", "speed-up", "loyalty", "of full", "headroom")
ELSEWHERE = "the output of --json"


def show_metrics(flags: argparse.Namespace) -> None:
    """Print the requested metrics. Raises UsageError or KVCompressError."""
    grid, left_out = load_grid(flags.folders, flags.metric, flags.filter, flags.cluster)
    lines, summary = curves(grid, flags.points, flags.lowest), overall(grid)
    found = {"full": paired_tests(grid, None, flags.margin)} if (grid["method"] != "full").any() else {}
    if flags.reference is not None:
        found[flags.reference] = paired_tests(grid, flags.reference, flags.margin)
    compared = pd.DataFrame()
    if flags.compare:
        a, b = flags.compare
        compared = paired_tests(grid, b, flags.margin, only=a)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    groups = [group for _, group in grid.groupby(GROUP)]
    warnings = [line for group in groups for line in (warning(group), *gate_lines(group)) if line]
    if flags.json:
        tested = pd.concat([pd.DataFrame(), *found.values()], ignore_index=True)
        cells = grid.drop(columns=["questions", "asked", "definition"])
        frames = {"cells": cells, "curves": lines, "overall": summary, "tests": tested}
        records = {name: _records(frame) for name, frame in {**frames, "compared": compared}.items()}
        blind = [dict(zip(("task", "doc_id"), key, strict=True)) for group in groups for key in answered_blind(group)]
        print(dumps({**records, "answered_blind": blind, "warnings": warnings}, indent=2))
        return
    console = terminal.console()
    for table in terminal_tables(grid, lines, summary, console.width):
        console.print(table)
    for name, frame in found.items():
        for key, group in frame.groupby(GROUP):
            title = f"{title_of(key)} against {name}"
            console.print(_tests_table(group, title, ["series", KEPT], flags, console.width))
    if len(compared):
        console.print(_tests_table(compared, "A - B", ["task", "a", "b"], flags, console.width))
    for line in warnings:
        print_warning(console, line)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows for JSON, with None for NaN."""
    missing = frame.astype(object).where(frame.notna(), None)
    return missing.to_dict("records")


def terminal_tables(grid: pd.DataFrame, lines: pd.DataFrame, summary: pd.DataFrame, width: int) -> list[Table]:
    """Format the results of `load_grid`, `curves` and `overall` for a terminal of `width` columns."""
    tables = []
    for key, group in grid.groupby(GROUP):
        tables.append(_cells_table(group, width))
        own = lines[(lines[GROUP] == list(key)).all(axis=1)] if len(lines) else lines
        if len(own):
            names = dict(zip(group["series"], short_names(group)[0], strict=True))
            tables.append(_curves_table(own.assign(series=own["series"].map(names)), width))
    if any(len(tasks) > 1 for tasks in summary.get("tasks", [])):
        tables.append(_overall_table(summary, width))
    return tables


def _cells_table(group: pd.DataFrame, width: int) -> Table:
    scale, title = score_scale(group), title_of(group[GROUP].iloc[0])
    metric, against_full = group["metric"].iloc[0], ("of full", "loyalty", "speed-up")
    has_headroom = group["headroom"].notna().any()  # only if the grid has `random` and `hindsight`
    headroom = ["headroom"] if has_headroom else []
    header, rows = ["method", KEPT, metric, *headroom, *against_full, "answers/s", "tokens/correct"], []
    names, shared = short_names(group)
    for name, row in zip(names, group.itertuples(), strict=True):
        values = [text_of(row.relative, 1, 100, " %"), text_of(row.loyalty, 1, 100, " %")]
        values += [text_of(row.speed_up, 2, 1, "x"), text_of(row.answers_per_s, 1), text_of(row.tokens_per_correct, 1)]
        if has_headroom:
            interval = f"[{text_of(row.headroom_low, 0, 100)}, {text_of(row.headroom_high, 0, 100)}] %"
            values.insert(0, "-" if pd.isna(row.headroom) else f"{text_of(row.headroom, 0, 100)} {interval}")
        score = fixed(scale * row.score, 1) + (f" ± {fixed(scale * row.stderr, 1)}" if row.draws > 1 else "")
        rows.append([name, kept(row.realised, row.ratio, row.budget), score, *values])
    title = "\n".join(filter(None, [title, shared]))
    return fitted(width, header, rows, title, droppable=DROPPABLE, elsewhere=ELSEWHERE)


def _curves_table(lines: pd.DataFrame, width: int) -> Table:
    first = lines.iloc[0]
    within = f"within {first['points']:g} point{'s' if first['points'] != 1 else ''}"
    header, rows = ["method", "area", f"smallest share {within}", f"answers/s {within}", "its tokens/answer"], []
    for row in lines.itertuples():
        speed = text_of(row.answers_per_s, 1) + f" (full {text_of(row.full_answers_per_s, 1)})"
        length = text_of(row.tokens_out, 1) + f" (full {text_of(row.full_tokens_out, 1)})"
        rows.append([row.series, text_of(row.area, 1, 100, " %"), share(row.smallest), speed, length])
    caption = f"Area: mean of score / full score from {share(first['from'])} of the KV entries to 1, on a log axis."
    return fitted(width, header, rows, caption=caption)


def _overall_table(summary: pd.DataFrame, width: int) -> Table:
    header = ["model", "method", KEPT, "tasks", "OP", "mean", "min", "OG", "OL", "least OL", "OE", "least OE"]
    rows = []
    for row in summary.itertuples():
        shares = [text_of(value, 1, 100) for value in (row.op, row.mean, row.min, row.og, row.ol, row.ol_min)]
        name = row.model + (f" ({row.settings})" if row.settings else "")
        speed_ups = [text_of(value, 2, 1, "x") for value in (row.oe, row.oe_min)]
        size = kept(row.kept, row.ratio, row.budget)
        rows.append([name, row.series, size, str(len(row.tasks)), *shares, *speed_ups])
    caption = "OP: root mean square of score / full score; OG: its deviation / mean. Kept: mean over the tasks."
    droppable = ("least OE", "least OL", "tasks", "min", "OG")
    return fitted(width, header, rows, "All tasks", caption, 1, droppable, ELSEWHERE)


def _tests_table(rows: pd.DataFrame, title: str, names: list[str], flags: argparse.Namespace, width: int) -> Table:
    """Format tests, with the columns `names` in front."""
    header, cells = columns(rows, flags.margin, flags.power)
    titles = {"series": "method", "a": "A", "b": "B"}
    header = [*(titles.get(name, name) for name in names), *header]
    cells = [[*of_row, *more] for of_row, more in zip(rows[names].to_numpy().tolist(), cells, strict=True)]
    caption = explanation(rows, flags.margin, flags.power, *(("A", "B") if "b" in names else ()))
    droppable = ("questions", "mended", "p", "tokens/answer")
    return fitted(width, header, cells, title, caption, names.index(names[-2]), droppable, ELSEWHERE)
