"""From results on disk to what a report shows: frames of cells and samples, and the data of the HTML page."""

import base64
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcompress import KVCompressError

from ..cells.kept_tokens import IMAGES_FOLDER, read_kept_tokens, shares
from ..cells.results import RESULTS_FILE, SAMPLES_FILE, dumps
from ..metrics import loyalty
from ..report import headline_metric, score_scale, sweep_frame

MOST_QUESTIONS = 1000  # of a group on the page; the files with all samples have no such bound
MOST_GOLD = 4  # accepted answers shown of a question


@dataclass(frozen=True)
class Group:
    """Cells that may be compared: of one task, one model and one set of settings.

    Attributes:
        cells: results.json of each cell, with `folder`, in the order of `frame`.
        frame: as `report.sweep_frame` makes it.
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
    """All finished cells under `root` (results, results/<task>, or results/<task>/<model>), in groups.

    Raises KVCompressError where there is none, or one cannot be read.
    """
    if not root.is_dir():
        raise KVCompressError(f"{str(root)!r} is not a folder with results")
    cells = []
    for file in sorted(root.rglob(RESULTS_FILE)):
        if any(part.startswith(".") for part in file.relative_to(root).parts):
            continue  # a cell that is being written
        try:
            cell = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise KVCompressError(f"{file} is damaged: {error}") from None
        if "protocol" in cell:
            cells.append({**cell, "folder": file.parent})
    if not cells:
        raise KVCompressError(f"no finished cell under {str(root)!r} (expected <task>/<model>/<cell>/{RESULTS_FILE})")
    groups = {}
    for cell in cells:
        protocol = cell["protocol"]
        key = (protocol["task"], protocol["model"], dumps(protocol["settings"]))
        groups.setdefault(key, []).append(cell)
    return [_group(groups[key]) for key in sorted(groups)]


def _group(cells: list[dict[str, Any]]) -> Group:
    frame = sweep_frame(cells)
    cells = [cells[index] for index in frame.index]
    frame = frame.reset_index(drop=True)
    return Group(cells, frame, samples_frame(cells, frame))


def samples_frame(cells: list[dict[str, Any]], frame: pd.DataFrame) -> pd.DataFrame:
    """One row per question and cell: `cell` (its row in `frame`), series, size, task, doc_id, question, gold (accepted
    answers), answer, score (NaN where the metric has none per question), and the measurements of the question."""
    rows = []
    for index, cell in enumerate(cells):
        metric = (headline_metric(cell) or "").split(",")[0]
        seen = set()
        for sample in _samples(cell["folder"]):
            if (key := (sample["task"], sample["doc_id"])) in seen:
                continue  # a task with several answer filters has a line for each; the first is the headline's
            seen.add(key)
            measured, score = sample["measurement"], sample.get(metric)
            rows.append(
                {
                    "cell": index,
                    "series": frame["series"][index],
                    "size": frame["size"][index],
                    "task": sample["task"],
                    "doc_id": sample["doc_id"],
                    "question": sample["input"],
                    "gold": gold(sample),
                    "answer": " ".join(str(answer).strip() for answer in np.ravel(sample["filtered_resps"])),
                    "score": float(score) if isinstance(score, int | float) else np.nan,
                    **{
                        name: measured[name]
                        for name in ("tokens_in", "tokens_out", "vision_tokens", "ttft_s", "tpot_s", "kv_bytes_prompt")
                    },
                }
            )
    return pd.DataFrame(rows)


def _samples(folder: Path) -> list[dict[str, Any]]:
    with open(folder / SAMPLES_FILE, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def gold(sample: dict[str, Any]) -> str:
    """The accepted answers of a question, the most frequent first: of its document where that names some, else the
    task's target."""
    doc = sample["doc"] if isinstance(sample.get("doc"), dict) else {}
    answers = doc.get("answers") or doc.get("answer") or sample.get("target")
    if not isinstance(answers, list):
        answers = [answers]
    counted = Counter(str(answer) for answer in answers if answer is not None)
    return " | ".join(answer for answer, _ in counted.most_common(MOST_GOLD))


def cells_table(groups: list[Group]) -> pd.DataFrame:
    """The cells of all groups in one frame."""
    parts = [group.frame.drop(columns="order").assign(task=group.task, model=group.model) for group in groups]
    table = pd.concat(parts, ignore_index=True)
    return table[["task", "model", *(name for name in table.columns if name not in ("task", "model"))]]


def samples_table(groups: list[Group]) -> pd.DataFrame:
    """The samples of all groups in one frame, each with its group's task, model and settings."""
    parts = []
    for group in groups:
        settings = group.frame["settings"].iloc[0]
        parts.append(group.samples.assign(group=group.task, model=group.model, settings=settings).drop(columns="cell"))
    table = pd.concat(parts, ignore_index=True)
    first = ["group", "model", "settings"]
    return table[[*first, *(name for name in table.columns if name not in first)]]


# -- the page


def page_data(groups: list[Group]) -> dict[str, Any]:
    """What the page shows, JSON-ready. `images`: file -> data URL, each once."""
    images: dict[str, str] = {}
    return {"groups": [_group_data(group, images) for group in groups], "images": images}


def _group_data(group: Group, images: dict[str, str]) -> dict[str, Any]:
    frame, samples = group.frame, group.samples
    entries = [list(read_kept_tokens(cell["folder"])) for cell in group.cells]
    overlays = overlay_data(entries)
    for cell, of_cell in zip(group.cells, entries, strict=True):
        for file in {image["file"] for entry in of_cell for image in entry["images"] if "file" in image}:
            if file not in images:
                images[file] = data_url((cell["folder"].parent / IMAGES_FOLDER / file).read_bytes())
    cells = []
    for index, row in enumerate(frame.itertuples()):
        efficiency = group.cells[index]["efficiency"]
        cells.append(
            {
                "series": row.series,
                "method": row.method,
                "size": f"budget {row.budget:.0f}" if pd.isna(row.ratio) else f"{row.ratio:g}",
                **{name: _number(getattr(row, name)) for name in CELL_NUMBERS},
                "samples": int(row.samples),
                "same": same_as_full(samples, frame, index),
                "per_layer": efficiency.get("realised_ratio", {}).get("per_layer"),
                "per_head": mean_shares(entries[index]),
            }
        )
    questions, pivot = [], {}
    if len(samples):
        columns = ["task", "doc_id"]
        pivot = {
            name: samples.pivot_table(index=columns, columns="cell", values=name, aggfunc="first")
            for name in ("answer", "score")
        }
        first = samples.drop_duplicates(columns).sort_values(columns)
        for row in first.head(MOST_QUESTIONS).itertuples():
            key = (row.task, row.doc_id)
            questions.append(
                {
                    "key": f"{row.task}/{row.doc_id}",
                    "q": row.question,
                    "gold": row.gold,
                    "a": [_at(pivot["answer"], key, index) for index in range(len(cells))],
                    "s": [_at(pivot["score"], key, index) for index in range(len(cells))],
                }
            )
    return {
        "title": group.title,
        "metric": frame["metric"].iloc[0] or "score",
        "scale": score_scale(frame),
        "cells": cells,
        "all_questions": samples[["task", "doc_id"]].drop_duplicates().shape[0] if len(samples) else 0,
        "questions": questions,
        "overlays": overlays,
    }


CELL_NUMBERS = ("ratio", "budget", "realised", "score", "stderr", "ttft_s", "tpot_s", "kv_bytes")


def overlay_data(entries: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Question -> its prompt and images, and under `cells` what survived in each cell that noted it.

    Args:
        entries: of each cell, as `read_kept_tokens` gives them.
    """
    overlays: dict[str, Any] = {}
    for index, of_cell in enumerate(entries):
        for entry in of_cell:
            overlay = overlays.setdefault(
                f"{entry['task']}/{entry['doc_id']}",
                {**{name: entry[name] for name in ("layers", "kv_heads", "pieces", "images")}, "cells": {}},
            )
            overlay["cells"][index] = {
                "vision": entry["vision"],
                "text": entry["text"],
                "shares": {
                    kind: None if (share := shares(entry, kind)) is None else round(float(share.mean()), 4)
                    for kind in ("vision", "text")
                },
            }
    return overlays


def same_as_full(samples: pd.DataFrame, frame: pd.DataFrame, index: int) -> float | None:
    """The share of a cell's questions with the full cache's own answer; None without a full cache or answers."""
    if frame["method"][0] != "full" or not len(samples):
        return None
    columns = ["task", "doc_id"]
    full, own = (samples[samples["cell"] == cell].set_index(columns)["answer"] for cell in (0, index))
    both = pd.concat([own, full], axis=1, keys=["own", "full"], join="inner")
    return loyalty(list(both["own"]), list(both["full"])) if len(both) else None


def mean_shares(entries: list[dict[str, Any]]) -> list[list[float]] | None:
    """The share of a prompt's tokens that each layer and KV head kept, [layer][head], mean over a cell's entries."""
    if not entries:
        return None
    return np.mean([shares(entry, "all") for entry in entries], axis=0).round(4).tolist()


def data_url(jpeg: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


def _at(pivot: pd.DataFrame, key: tuple, index: int) -> Any:
    """A value of a pivot table, None where it has none."""
    if index not in pivot.columns or key not in pivot.index:
        return None
    value = pivot.at[key, index]
    return None if pd.isna(value) else value


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
