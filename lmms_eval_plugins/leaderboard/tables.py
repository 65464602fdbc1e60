"""`tables.json` in a submission: tables of many methods with the score of every question, but without times."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvcompress import KVCompressError
from kvcompress.errors import first_fault

from ..cells.results import exact
from ..report.html.data import CELL_NUMBERS, cell_data
from .boards import Row, board, interval

FILE = "tables.json"
Share = Annotated[float, Field(ge=0, le=1)]


class Entry(BaseModel):
    """A method at one ratio (None: the full cache), with the score of each question from 0 to 1 and, if it was
    measured, the share of the prompts' KV entries that is kept."""

    model_config = ConfigDict(extra="forbid")
    method: str
    ratio: float | None = Field(gt=0, le=1)
    scores: list[Share] = Field(min_length=1)
    kept: Share | None = None


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
        counts = {len(entry.scores) for entry in self.entries}
        if self.clusters is not None:
            counts.add(len(self.clusters))
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
        where, message, _ = first_fault(error)
        raise KVCompressError(f"{str(file)!r} is no file of tables: {where} {message}".replace("  ", " ")) from None


def board_of(table: Table, submission: str) -> dict[str, Any]:
    """Return a table of the leaderboard, as `boards.leaderboard` does."""
    count = len(table.entries[0].scores)
    clusters = range(count) if table.clusters is None else table.clusters
    every = [pd.DataFrame({"score": one.scores, "cluster": clusters, "tokens_out": np.nan}) for one in table.entries]
    full = next((own for entry, own in zip(table.entries, every, strict=True) if entry.ratio is None), None)
    question = table.task, "", table.metric, count
    rows = []
    for entry, questions in zip(table.entries, every, strict=True):
        is_full = entry.ratio is None
        framed = pd.Series(
            {
                **dict.fromkeys(CELL_NUMBERS),
                "series": entry.method,
                "method": entry.method,
                "ratio": 1.0 if is_full else entry.ratio,
                "asked": exact(1.0 if is_full else entry.ratio),
                "realised": 1.0 if is_full else entry.kept,
                "score": float(np.mean(entry.scores)),
                "is_lower_better": False,
                "samples": count,
                "too_short": False,
                "questions": questions,
            }
        )
        shown = {
            **cell_data(framed),
            "submission": submission,
            "model": table.model,
            "revision": "",
            "variant": entry.method,
            "interval": interval(framed),
            "same": None,
            "versions": table.versions,
            "environment": {},
            "code": "",
            "date": "",
            "command": table.command,
        }
        rows.append(Row(question, table.protocol, framed, None if questions is full else full, shown))
    return board(question, table.protocol, rows, table.regime)
