"""Build the tables of a leaderboard, JSON-ready, one for each task and protocol."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..report.against import against
from ..report.appearance import colour, markers, score_scale
from ..report.groups import Group
from ..report.html.data import CELL_NUMBERS, number, same_answers, test_data
from ..report.numbers import kept
from ..report.short_answers import warning
from ..report.significance import mean_interval
from .choice import best_methods, choose
from .protocol import definition, holds_full, protocol_of, regime, variant
from .rerun import command_of

WITHIN = 1.96  # standard errors on either side of the mean cover 95 % of a normal distribution
ENVIRONMENT = ("device", "dtype", "attn_implementation", "threads", "processes", "python")


@dataclass
class Row:
    """A cell of a submission with what a table needs: its row in the report's frame (see `table.sweep_frame`), its
    protocol, the values shown, and its questions with those of the full cache, if it is to be compared with one."""

    cell: dict[str, Any]
    framed: pd.Series
    protocol: dict[str, str]
    shown: dict[str, Any]
    pair: tuple[pd.DataFrame, pd.DataFrame] | None

    @property
    def question(self) -> tuple[str, str, str, int]:
        """What the score measures: task, its definition, metric, number of questions."""
        return self.cell["protocol"]["task"], definition(self.cell), self.framed["metric"], self.shown["samples"]


def rows_of(submission: str, groups: Iterable[Group]) -> list[Row]:
    """Return all scored cells of a submission."""
    rows = []
    for group in groups:
        questions = group.frame["questions"]
        for index, cell in enumerate(group.cells):
            framed, full = group.frame.iloc[index], _full_of(group, index)
            if pd.notna(framed["score"]):
                pair = None if full in (None, index) else (questions[index], questions[full])
                shown = _shown(submission, group, index)
                rows.append(Row(cell, framed, protocol_of(cell), shown, pair))
    return rows


def leaderboard(rows: Sequence[Row], further: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the data of the page: `boards`, sorted by regime and task, `further` ones (`tables.board`) included."""
    tables: dict[tuple, list[Row]] = {}
    compressed = [row for row in rows if row.cell["protocol"]["method"] != "full"]
    for row in compressed:
        tables.setdefault((row.question, tuple(row.protocol.items())), []).append(row)
    for row in rows:
        if row.cell["protocol"]["method"] == "full":
            found = [key for key in tables if key[0] == row.question and holds_full(dict(key[1]), row.protocol)]
            for key in found or [(row.question, tuple(row.protocol.items()))]:
                tables.setdefault(key, []).append(row)
    of_task: dict[str, list[Row]] = {}
    for row in rows:
        of_task.setdefault(row.question[0], []).append(row)
    regimes = {task: regime([row.cell for row in own]) for task, own in of_task.items()}
    boards = [
        _board(question, dict(protocol), own, regimes[question[0]], [key[0] for key in tables])
        for (question, protocol), own in tables.items()
    ]
    boards += further
    order = ("regime", "task", "protocol_text")
    return {"boards": sorted(boards, key=lambda board: [board[name] for name in order])}


def _board(
    question: tuple[str, str, str, int],
    protocol: dict[str, str],
    rows: list[Row],
    regime: str,
    questions: list[tuple[str, str, str, int]],
) -> dict[str, Any]:
    """Build one table. `questions`: the `Row.question` of all tables; what distinguishes this table from others of its
    task becomes part of its name."""
    task, of_task, metric, count = question
    others = [other for other in questions if other[0] == task]
    text = ", ".join(f"{name}={value}" for name, value in protocol.items())
    text += f"; {count} questions"
    text += f", {metric}" if len({other[2] for other in others}) > 1 else ""
    text += f", task {of_task}" if len({other[1] for other in others}) > 1 else ""
    has_models = len({row.shown["model"] for row in rows}) > 1
    frame = pd.DataFrame([row.framed for row in rows]).reset_index(drop=True)
    rows = sorted(rows, key=lambda row: (row.shown["method"] != "full", -row.shown["score"]))
    tests = against([row.pair for row in rows])
    cells = [
        {
            **row.shown,
            "series": f"{row.shown['model']}: " * has_models + row.shown["variant"],
            "against": test_data(tests.iloc[place]),
        }
        for place, row in enumerate(rows)
    ]
    marks = markers({cell["series"]: cell["method"] for cell in cells})
    cells = [{**cell, "marker": marks[cell["series"]]} for cell in cells]
    return {
        "regime": regime,
        "task": task,
        "protocol": protocol,
        "protocol_text": text,
        "questions": count,
        "metric": metric,
        "scale": score_scale(frame),
        "warning": warning(frame),
        "cells": cells,
        **({"choice": None, "best": []} if has_models else _choice(rows)),
    }


def _choice(rows: list[Row]) -> dict[str, Any]:
    """Return what `choice.py` says about rows of one model that answered all questions of the table."""
    scores, reference = {}, None
    for row in rows:
        if row.pair is not None and pd.notna(row.framed["ratio"]):
            own, full = row.pair
            reference = full if reference is None else reference
            if own.index.equals(reference.index) and not own["score"].isna().any():
                scores[row.shown["variant"], float(row.framed["ratio"])] = own["score"]
    if reference is None or reference["score"].isna().any() or not scores:
        return {"choice": None, "best": []}
    chosen = choose(scores, reference["score"], list(reference["cluster"]))
    return {"choice": None if chosen is None else chosen.as_data(), "best": best_methods(scores)}


def _shown(submission: str, group: Group, index: int) -> dict[str, Any]:
    """Return the values shown for a cell."""
    cell, row = group.cells[index], group.frame.iloc[index]
    environment, protocol = cell.get("environment", {}), cell["protocol"]
    full = _full_of(group, index)
    model = protocol["model"]
    return {
        "submission": submission,
        "model": Path(model).name if Path(model).is_absolute() else model,
        "revision": protocol["settings"].get("revision", ""),
        "method": row["method"],
        "variant": variant(cell),
        "size": row["asked"],
        "kept": kept(row["realised"], row["ratio"], row["budget"]),
        "colour": colour(row["method"]),
        **{name: number(row[name]) for name in CELL_NUMBERS},
        "interval": _interval(row),
        "same": None if full is None else same_answers(row["questions"], group.frame["questions"][full]),
        "samples": int(row["samples"]),
        "versions": environment.get("versions", {}),
        "environment": {name: environment[name] for name in ENVIRONMENT if name in environment},
        "code": cell.get("fingerprint", {}).get("code", ""),
        "date": str(cell.get("date", ""))[:10],
        "command": command_of(cell),
    }


def _full_of(group: Group, index: int) -> int | None:
    """Return the index of the full-cache cell to compare a cell with; None if its submission has none."""
    protocol = protocol_of(group.cells[index])
    for place, cell in enumerate(group.cells):
        if cell["protocol"]["method"] == "full" and holds_full(protocol, protocol_of(cell)):
            return place
    return None


def _interval(row: pd.Series) -> list[float] | None:
    """Return the 95 % interval of a score over its questions, clustered; for a score that is not their mean, from its
    standard error. None if it has neither."""
    questions = row["questions"]
    scores = questions["score"].astype(float)
    if len(scores) and math.isclose(scores.mean(skipna=False), row["score"], abs_tol=1e-6):
        ends = mean_interval(scores, questions["cluster"])
        return None if ends is None else [*ends]
    error = number(row["stderr"])
    return None if error is None else [row["score"] - WITHIN * error, row["score"] + WITHIN * error]
