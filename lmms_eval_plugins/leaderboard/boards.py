"""Build the tables of a leaderboard, JSON-ready, one for each task and protocol."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..report.against import against
from ..report.appearance import markers, score_scale
from ..report.draws import SEED
from ..report.groups import Group
from ..report.html.data import cell_data, number, same_answers, test_data
from ..report.short_answers import warning
from ..report.significance import mean_interval
from ..report.table import definition
from .choice import best_methods, choose
from .protocol import holds_full, protocol_of, regime, variant
from .rerun import command_of

WITHIN = 1.96  # standard errors on either side of the mean cover 95 % of a normal distribution
ENVIRONMENT = ("device", "dtype", "attn_implementation", "threads", "processes", "python")


@dataclass
class Row:
    """A row of a table.

    Attributes:
        question: what the score measures: task, its definition, metric, number of questions.
        protocol: as from `protocol_of`.
        framed: its row in the frame of a `Group`.
        full: the questions of the full cache, if it is to be compared with one.
        shown: the values shown.
        cell: its results; empty for a row of `tables.json`.
    """

    question: tuple[str, str, str, int]
    protocol: dict[str, str]
    framed: pd.Series
    full: pd.DataFrame | None
    shown: dict[str, Any]
    cell: dict[str, Any] = field(default_factory=dict)


def rows_of(submission: str, groups: Iterable[Group]) -> list[Row]:
    """Return all scored cells of a submission."""
    rows = []
    for group in groups:
        protocols = [protocol_of(cell) for cell in group.cells]
        whole = [place for place, cell in enumerate(group.cells) if cell["protocol"]["method"] == "full"]
        for place, (cell, protocol) in enumerate(zip(group.cells, protocols, strict=True)):
            framed = group.frame.iloc[place]
            if pd.isna(framed["score"]):
                continue
            full = next((other for other in whole if holds_full(protocol, protocols[other])), None)
            of_full = None if full is None else group.frame["questions"][full]
            shown = _shown(submission, cell, framed, of_full)
            question = group.task, definition(cell), framed["metric"], shown["samples"]
            rows.append(Row(question, protocol, framed, None if full == place else of_full, shown, cell))
    return rows


def leaderboard(rows: Sequence[Row], further: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the data of the page: `boards`, sorted by regime and task, `further` ones (`tables.board_of`) included."""
    tables: dict[tuple, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.shown["method"] == "full"):
        own, found = (row.question, tuple(row.protocol.items())), []
        if row.shown["method"] == "full":
            found = [key for key in tables if key[0] == row.question and holds_full(dict(key[1]), row.protocol)]
        for key in found or [own]:
            tables.setdefault(key, []).append(row)
    of_task: dict[str, list[Row]] = {}
    for row in rows:
        of_task.setdefault(row.question[0], []).append(row)
    regimes = {task: regime([row.cell for row in own]) for task, own in of_task.items()}
    boards = [
        board(question, dict(protocol), own, regimes[question[0]], [key[0] for key in tables])
        for (question, protocol), own in tables.items()
    ]
    boards += further
    order = ("regime", "task", "protocol_text")
    return {"boards": sorted(boards, key=lambda each: [each[name] for name in order])}


def board(
    question: tuple[str, str, str, int],
    protocol: dict[str, str],
    rows: list[Row],
    regime: str,
    questions: Sequence[tuple[str, str, str, int]] = (),
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
    is_lower = bool(frame["is_lower_better"].any())
    rows = sorted(rows, key=lambda row: (row.shown["method"] != "full", row.shown["score"] * (1 if is_lower else -1)))
    pairs = [None if row.full is None or is_lower else (row.framed["questions"], row.full) for row in rows]
    tests = against(pairs)
    names = [f"{row.shown['model']}: " * has_models + row.shown["variant"] for row in rows]
    marks = markers({name: row.shown["method"] for name, row in zip(names, rows, strict=True)})
    cells = [
        {**row.shown, "series": name, "marker": marks[name], "against": test_data(tests.iloc[place])}
        for place, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    return {
        "regime": regime,
        "task": task,
        "protocol": protocol,
        "protocol_text": text,
        "questions": count,
        "metric": metric,
        "scale": score_scale(frame),
        "is_lower_better": is_lower,
        "warning": warning(frame),
        "cells": cells,
        **({"choice": None, "best": []} if has_models or is_lower else _choice(rows)),
    }


def _choice(rows: list[Row]) -> dict[str, Any]:
    """Return what `choice.py` says about rows of one model that answered all questions of the table; without a full
    cache there is nothing to choose, but some are best. Draws of a method count as one, with their mean scores."""
    reference = next((row.full for row in rows if row.full is not None), None)
    asked = rows[0].framed["questions"] if reference is None else reference
    draws: dict[tuple[str, float], list[pd.Series]] = {}
    for row in rows:
        own, is_full = row.framed["questions"], row.shown["method"] == "full"
        is_comparable = not is_full and (row.full is not None or reference is None) and pd.notna(row.framed["ratio"])
        if is_comparable and own.index.equals(asked.index) and not own["score"].isna().any():
            name = " ".join(word for word in row.shown["variant"].split(" ") if not word.startswith(SEED))
            draws.setdefault((name, float(row.framed["ratio"])), []).append(own["score"])
    scores = {key: np.mean(each, axis=0) for key, each in draws.items()}
    if asked["score"].isna().any() or not scores:
        return {"choice": None, "best": []}
    chosen = None if reference is None else choose(scores, reference["score"], list(reference["cluster"]))
    return {"choice": None if chosen is None else chosen.as_data(), "best": best_methods(scores)}


def _shown(submission: str, cell: dict[str, Any], framed: pd.Series, full: pd.DataFrame | None) -> dict[str, Any]:
    """Return the values shown for a cell."""
    environment, protocol = cell.get("environment", {}), cell["protocol"]
    model = protocol["model"]
    return {
        **cell_data(framed),
        "submission": submission,
        "model": Path(model).name if Path(model).is_absolute() else model,
        "revision": protocol["settings"].get("revision", ""),
        "variant": variant(cell),
        "interval": interval(framed),
        "same": None if full is None else same_answers(framed["questions"], full),
        "versions": environment.get("versions", {}),
        "environment": {name: environment[name] for name in ENVIRONMENT if name in environment},
        "code": cell.get("fingerprint", {}).get("code", ""),
        "date": str(cell.get("date", ""))[:10],
        "command": command_of(cell),
    }


def interval(framed: pd.Series) -> list[float] | None:
    """Return the 95 % interval of a score over its questions, clustered; for a score that is not their mean, from its
    standard error. None if it has neither."""
    questions, score, error = framed["questions"], framed["score"], number(framed["stderr"])
    scores = questions["score"].astype(float)
    if len(scores) and math.isclose(scores.mean(skipna=False), score, abs_tol=1e-6):
        ends = mean_interval(scores, questions["cluster"])
        return None if ends is None else [*ends]
    return None if error is None else [score - WITHIN * error, score + WITHIN * error]
