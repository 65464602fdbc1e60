"""Load results on disk into frames of cells and samples."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcompress import KVCompressError
from kvcompress.files import UNFINISHED

from ...cells.errors import leave_out
from ...cells.results import RESULTS_FILE, DamagedFile, read_cell
from ..against import against
from ..clusters import cluster_of
from ..grid import tokens_out
from ..table import by_question, headline, sweep_frame

MOST_GOLD = 4  # accepted answers shown per question


@dataclass(frozen=True)
class Group:
    """Cells that may be compared: those of one task, model and set of settings.

    Attributes:
        cells: the results.json of each cell, with its `folder` and `samples` (the lines of its samples.jsonl), in the
            order of `frame`.
        frame: as from `table.sweep_frame`.
        samples: one row per question and cell, see `samples_frame`.
    """

    cells: list[dict[str, Any]]
    frame: pd.DataFrame
    samples: pd.DataFrame

    @property
    def task(self) -> str:
        return self.cells[0]["protocol"]["task"]

    @property
    def model(self) -> str:
        return Path(self.cells[0]["protocol"]["model"]).name

    @property
    def title(self) -> str:
        settings = self.frame["settings_text"].iloc[0]
        return f"{self.task}, {self.model}" + (f" ({settings})" if settings else "")


def load_groups(root: Path) -> list[Group]:
    """Load all finished cells under `root` (results, results/<task>, or results/<task>/<model>), in groups. A damaged
    one is left out, with a line that names it.

    Raises KVCompressError if there is none.
    """
    if not root.is_dir():
        raise KVCompressError(f"{str(root)!r} is not a folder with results")
    cells, damaged = [], {}
    for file in sorted(root.rglob(RESULTS_FILE)):
        folder = file.parent
        if any(part.startswith(UNFINISHED) for part in file.relative_to(root).parts):
            continue  # a cell that is being written
        try:
            results, samples = read_cell(folder)
            cells.append({**results, "folder": folder, "samples": samples})
        except (DamagedFile, FileNotFoundError) as error:
            damaged[folder] = error
    if not cells:
        reasons = "; ".join(f"{folder}: {error}" for folder, error in damaged.items())
        raise KVCompressError(
            f"no finished cell under {str(root)!r}: " + (reasons or f"expected <task>/<model>/<cell>/{RESULTS_FILE}")
        )
    for folder, error in damaged.items():
        leave_out(folder, error)
    groups = {}
    for cell in cells:
        protocol = cell["protocol"]
        key = (protocol["task"], protocol["model"], json.dumps(protocol["settings"], sort_keys=True))
        groups.setdefault(key, []).append(cell)
    return [_group(groups[key]) for key in sorted(groups)]


def _group(cells: list[dict[str, Any]]) -> Group:
    frame = sweep_frame(cells)
    cells = [cells[index] for index in frame.index]
    frame = frame.reset_index(drop=True)
    return Group(cells, frame, samples_frame(cells, frame))


def question_frames(samples: pd.DataFrame, cells: int) -> list[pd.DataFrame]:
    """Return the questions of each cell, by (task, doc_id)."""
    if not len(samples):
        return [pd.DataFrame({"score": [], "cluster": []})] * cells
    by_question = samples.set_index(["task", "doc_id"]).sort_index()
    return [by_question[by_question["cell"] == cell] for cell in range(cells)]


def with_questions(group: Group) -> pd.DataFrame:
    """Return the group's frame with each cell's `questions`, see `question_frames`."""
    return group.frame.assign(questions=question_frames(group.samples, len(group.frame)))


def against_full(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what `against` says of each cell and the first one of the full cache; NaN if there is none.

    `frame`: as from `with_questions`."""
    first = frame.iloc[0]
    return against(
        [
            (row.questions, first["questions"]) if first["method"] == "full" and row.method != "full" else None
            for row in frame.itertuples()
        ]
    )


def samples_frame(cells: list[dict[str, Any]], frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per question and cell: `cell` (its row in `frame`), series, size, task, doc_id, question, gold
    (accepted answers), target (the task's right answer), answer, score (NaN if the metric has none per question),
    cluster (see `cluster_of`), and the question's measurements."""
    rows = []
    for index, cell in enumerate(cells):
        found = headline(cell)
        for sample, score in by_question(cell, cell["samples"], found):
            measured = sample["measurement"]
            rows.append(
                {
                    "cell": index,
                    "series": frame["series"][index],
                    "size": frame["size"][index],
                    "task": sample["task"],
                    "doc_id": sample["doc_id"],
                    "question": sample.get("input"),
                    "gold": gold(sample),
                    "target": None if sample.get("target") is None else str(sample["target"]),
                    "answer": " ".join(str(answer).strip() for answer in np.ravel(sample["filtered_resps"])),
                    "score": score,
                    "cluster": cluster_of(cell, sample, found),
                    **{
                        name: measured.get(name)
                        for name in ("tokens_in", "vision_tokens", "ttft_s", "tpot_s", "kv_bytes_prompt")
                    },
                    "tokens_out": tokens_out(sample),
                }
            )
    return pd.DataFrame(rows)


def gold(sample: dict[str, Any]) -> str:
    """Return a question's accepted answers, the most frequent first: its document's if it has some, else the task's
    target."""
    doc = sample["doc"] if isinstance(sample.get("doc"), dict) else {}
    answers = doc.get("answers") or doc.get("answer") or sample.get("target")
    if not isinstance(answers, list):
        answers = [answers]
    counted = Counter(str(answer) for answer in answers if answer is not None)
    return " | ".join(answer for answer, _ in counted.most_common(MOST_GOLD))


def cells_table(groups: list[Group]) -> pd.DataFrame:
    """Join the cells of all groups in one frame."""
    inner = ["order", "options", "per_layer", "kept"]  # lists, and what other columns contain
    parts = []
    for group in groups:
        tests = against_full(with_questions(group))[
            ["difference", "low", "high", "p_value", "holm", "broken", "mended"]
        ]
        frame = group.frame.drop(columns=inner).assign(task=group.task, model=group.model)
        parts.append(frame.join(tests.add_prefix("against_full_")))
    table = pd.concat(parts, ignore_index=True)
    return table[["task", "model", *(name for name in table.columns if name not in ("task", "model"))]]


def samples_table(groups: list[Group]) -> pd.DataFrame:
    """Join the samples of all groups in one frame, each with its group's task, model and settings."""
    parts = []
    for group in groups:
        settings = group.frame["settings"].iloc[0]
        parts.append(group.samples.assign(group=group.task, model=group.model, settings=settings).drop(columns="cell"))
    table = pd.concat(parts, ignore_index=True)
    first = ["group", "model", "settings"]
    return table[[*first, *(name for name in table.columns if name not in first)]]
