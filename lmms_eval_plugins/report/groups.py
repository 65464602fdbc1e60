"""Load results on disk into groups of cells that may be compared, with their questions."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcompress import KVCompressError
from kvcompress.files import UNFINISHED

from ..cells.errors import leave_out
from ..cells.results import RESULTS_FILE, DamagedFile, read_cell, result_folders, tokens_out
from .clusters import cluster_of
from .headline import by_question, headline
from .table import sweep_frame, title_of

MOST_GOLD = 4  # accepted answers shown per question
MEASURED = ("tokens_in", "vision_tokens", "ttft_s", "tpot_s", "kv_bytes_prompt")
QUESTION = ("task", "doc_id", "question", "gold", "target", "answer", "score", "cluster", *MEASURED, "tokens_out")


@dataclass(frozen=True)
class Group:
    """Cells that may be compared: those of one task, model and set of settings.

    Attributes:
        cells: as from `read_cells`, in the order of `frame`.
        frame: as from `table.sweep_frame`, and each cell's `questions`, see `question_frame`.
    """

    cells: list[dict[str, Any]]
    frame: pd.DataFrame

    @property
    def task(self) -> str:
        return self.cells[0]["protocol"]["task"]

    @property
    def model(self) -> str:
        return Path(self.cells[0]["protocol"]["model"]).name

    @property
    def title(self) -> str:
        return title_of((self.task, self.model, self.frame["settings_text"].iloc[0]))


def cell_folders(root: Path, directly: bool = False) -> list[Path]:
    """Return the folders of all cells under `root`, or `directly` in it, except those that are being written."""
    folders = sorted(file.parent for file in root.glob(f"[!.]*/{RESULTS_FILE}")) if directly else result_folders(root)
    return [each for each in folders if not any(part.startswith(UNFINISHED) for part in each.relative_to(root).parts)]


def read_cells(root: Path, directly: bool = False) -> tuple[list[dict[str, Any]], dict[Path, Exception]]:
    """Read the cells of `cell_folders`.

    Returns:
        The results.json of each cell, with its `folder` and `samples` (the lines of its samples.jsonl).
        Folder -> what is wrong, for damaged ones.
    """
    cells, damaged = [], {}
    for folder in cell_folders(root, directly):
        try:
            results, samples = read_cell(folder)
            cells.append({**results, "folder": folder, "samples": samples})
        except (DamagedFile, FileNotFoundError) as error:
            damaged[folder] = error
    return cells, damaged


def load_groups(root: Path) -> list[Group]:
    """Load all finished cells under `root` (results, results/<task>, or results/<task>/<model>), in groups. A damaged
    one is left out, with a line that names it.

    Raises KVCompressError if there is none.
    """
    if not root.is_dir():
        raise KVCompressError(f"{str(root)!r} is not a folder with results")
    cells, damaged = read_cells(root)
    if not cells:
        reasons = "; ".join(f"{folder}: {error}" for folder, error in damaged.items())
        raise KVCompressError(
            f"no finished cell under {str(root)!r}: " + (reasons or f"expected <task>/<model>/<cell>/{RESULTS_FILE}")
        )
    for folder, error in damaged.items():
        leave_out(folder, error)
    return grouped(cells)


def grouped(
    cells: Iterable[dict[str, Any]],
    metric: str | None = None,
    metric_filter: str | None = None,
    cluster: str | None = None,
) -> list[Group]:
    """Group cells that may be compared.

    Args:
        cells: as from `read_cells`.
        metric, metric_filter: the metric and answer filter to use; default: the task's main ones.
        cluster: the field that tells which questions belong together, see `cluster_of`.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        protocol = cell["protocol"]
        key = (protocol["task"], protocol["model"], json.dumps(protocol["settings"], sort_keys=True))
        groups.setdefault(key, []).append(cell)
    found = []
    for _, own in sorted(groups.items()):
        frame = sweep_frame(own, metric, metric_filter)
        own = [own[index] for index in frame.index]
        questions = [question_frame(cell, metric, metric_filter, cluster) for cell in own]
        found.append(Group(own, frame.reset_index(drop=True).assign(questions=questions)))
    return found


def question_frame(
    cell: dict[str, Any], metric: str | None = None, metric_filter: str | None = None, cluster: str | None = None
) -> pd.DataFrame:
    """Return a cell's questions by (task, doc_id), sorted, with the columns question, gold (accepted answers), target
    (the task's right answer as text), answer, score (NaN if the metric has none per question), cluster (see
    `cluster_of`), the measurements, tokens_out and seconds."""
    found, rows = headline(cell, metric, metric_filter), []
    for sample, score in by_question(cell, cell["samples"], found):
        target, measured = sample.get("target"), sample["measurement"]
        rows.append(
            {
                "task": sample["task"],
                "doc_id": sample["doc_id"],
                "question": sample.get("input"),
                "gold": gold(sample),
                "target": None if target is None else str(target),
                "answer": " ".join(str(answer).strip() for answer in np.ravel(sample["filtered_resps"])),
                "score": score,
                "cluster": cluster_of(cell, sample, found, cluster),
                **{name: measured.get(name) for name in MEASURED},
                "tokens_out": tokens_out(cell, sample),
                "seconds": seconds(sample),
            }
        )
    return pd.DataFrame(rows, columns=[*QUESTION, "seconds"]).set_index(["task", "doc_id"]).sort_index()


def gold(sample: dict[str, Any]) -> str:
    """Return a question's accepted answers, the most frequent first: its document's if it has some, else the task's
    target."""
    doc = sample["doc"] if isinstance(sample.get("doc"), dict) else {}
    answers = doc.get("answers") or doc.get("answer") or sample.get("target")
    if not isinstance(answers, list):
        answers = [answers]
    counted = Counter(str(answer) for answer in answers if answer is not None)
    return " | ".join(answer for answer, _ in counted.most_common(MOST_GOLD))


def seconds(sample: dict[str, Any]) -> float:
    """Return the seconds of a question's answer, or of all its answers together; NaN if a part was not timed."""
    measured = sample.get("measurements", [sample["measurement"]])
    if any(row.get("ttft_s") is None or (row["tpot_s"] is None and row["tokens_out"] > 1) for row in measured):
        return math.nan
    return sum(row["ttft_s"] + (row["tpot_s"] or 0) * (row["tokens_out"] - 1) for row in measured)
