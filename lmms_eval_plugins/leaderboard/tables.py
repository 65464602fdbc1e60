"""`tables.json` in a submission: tables of many methods with the score of every question, but without times."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvcompress import KVCompressError

from ..cells.results import exact
from ..report.against import against
from ..report.appearance import colour, markers
from ..report.html.data import CELL_NUMBERS, test_data
from ..report.numbers import kept
from ..report.significance import mean_interval
from .choice import best_methods, choose

FILE = "tables.json"


class Entry(BaseModel):
    """A method at one ratio (None: the full cache), with the score of each question from 0 to 1 and, if it was
    measured, the share of the prompts' KV entries that is kept."""

    model_config = ConfigDict(extra="forbid")
    method: str
    ratio: float | None = Field(gt=0, le=1)
    scores: list[float] = Field(min_length=1)
    kept: float | None = None


class Table(BaseModel):
    """Answers to the same questions under one protocol.

    Attributes:
        regime, task, model, protocol: as on the leaderboard.
        metric: name of the score.
        command: what made the table, a shell line.
        versions: package -> version.
        clusters: what each question is about, (questions,); None: each about something else.
    """

    model_config = ConfigDict(extra="forbid")
    regime: str
    task: str
    model: str
    protocol: dict[str, str]
    metric: str
    command: str
    versions: dict[str, str]
    clusters: list[str] | None = None
    entries: list[Entry] = Field(min_length=1)

    @model_validator(mode="after")
    def has_equal_questions(self) -> "Table":
        counts = {len(entry.scores) for entry in self.entries} | ({len(self.clusters)} if self.clusters else set())
        if len(counts) > 1:
            raise ValueError(f"{self.task}: all entries need the same questions, not {sorted(counts)}")
        return self


class Tables(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tables: list[Table]


def read(folder: Path) -> list[Table]:
    """Return the tables of a submission's folder; none if it has no such file. Raises KVCompressError if it is damaged
    or something else."""
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        return Tables.model_validate_json(file.read_bytes()).tables
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KVCompressError(f"{FILE} is no file of tables: {where} {first['msg']}".replace("  ", " ")) from None


def board(table: Table, submission: str) -> dict[str, Any]:
    """Return a table of the leaderboard, as `boards.leaderboard` does."""
    entries = sorted(table.entries, key=lambda entry: (entry.ratio is not None, -float(np.mean(entry.scores))))
    clusters = range(len(entries[0].scores)) if table.clusters is None else table.clusters
    frames = [pd.DataFrame({"score": one.scores, "cluster": clusters, "tokens_out": np.nan}) for one in entries]
    full = next((frame for entry, frame in zip(entries, frames, strict=True) if entry.ratio is None), None)
    pairs = [None if full is None or frame is full else (frame, full) for frame in frames]
    tests, marks = against(pairs), markers({entry.method: entry.method for entry in entries})
    cells = []
    for place, entry in enumerate(entries):
        interval, ratio = mean_interval(entry.scores, clusters), 1.0 if entry.ratio is None else entry.ratio
        share = 1.0 if entry.ratio is None else entry.kept
        known = {"ratio": ratio, "realised": share, "score": float(np.mean(entry.scores))}
        cells.append(
            {
                "submission": submission,
                "model": table.model,
                "revision": "",
                "method": entry.method,
                "variant": entry.method,
                "series": entry.method,
                "size": exact(ratio),
                "kept": kept(share, ratio),
                "colour": colour(entry.method),
                "marker": marks[entry.method],
                **dict.fromkeys(CELL_NUMBERS),
                **known,
                "interval": None if interval is None else [*interval],
                "same": None,
                "samples": len(entry.scores),
                "versions": table.versions,
                "environment": {},
                "code": "",
                "date": "",
                "command": table.command,
                "against": test_data(tests.iloc[place]),
            }
        )
    scores = {(entry.method, entry.ratio): entry.scores for entry in entries if entry.ratio is not None}
    chosen = None if full is None else choose(scores, full["score"], table.clusters)
    return {
        "regime": table.regime,
        "task": table.task,
        "protocol": table.protocol,
        "protocol_text": ", ".join(f"{name}={value}" for name, value in table.protocol.items())
        + f"; {len(clusters)} questions",
        "questions": len(clusters),
        "metric": table.metric,
        "scale": 100,
        "warning": "",
        "cells": cells,
        "choice": None if chosen is None else chosen.as_data(),
        "best": best_methods(scores),
    }
