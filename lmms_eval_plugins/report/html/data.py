"""Collect the data of the HTML page, JSON-ready."""

import base64
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...cells.errors import leave_out
from ...cells.kept_tokens_file import IMAGES_FOLDER, needs, needs_kept, read_kept_tokens, shares
from ...cells.results import DamagedFile
from ..against import MARGIN, against_full
from ..appearance import colour, markers, score_scale
from ..draws import explanation, pooled
from ..gate import gate_lines
from ..grid import headrooms
from ..groups import Group
from ..metrics import loyalty
from ..numbers import kept
from ..short_answers import warning
from ..table import best_of_sizes

MOST_QUESTIONS = 1000  # per group on the page; the files with all samples have no such limit
CELL_NUMBERS = (
    "ratio", "budget", "realised", "score", "stderr", "ttft_s", "tpot_s", "kv_bytes", "answers_per_s", "tokens_per_s",
    "tokens_per_correct", "tokens_out",
)  # fmt: skip


def page_data(groups: list[Group]) -> dict[str, Any]:
    """Return the data of the page, JSON-ready; its `images` maps each file to its data URL. Draws of a method are one
    cell, with the answers and kept tokens of the first."""
    images: dict[str, str | None] = {}
    shown = []
    for group in groups:
        frame = pooled(with_loyalty(group.frame))
        cells = [group.cells[place] for place in frame.index]
        shown.append(page_group(Group(cells, frame), [_entries(cell["folder"], images) for cell in cells]))
    return {"groups": shown, "images": {file: url for file, url in images.items() if url}}


def with_loyalty(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame of a `Group` with the column `loyalty`, the share of answers that are the full cache's."""
    full = frame["questions"].iloc[0] if frame["method"].iloc[0] == "full" else None
    return frame.assign(loyalty=[None if full is None else same_answers(own, full) for own in frame["questions"]])


def page_group(group: Group, entries: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the data of one group.

    Args:
        group: its frame also has `loyalty`, see `with_loyalty`.
        entries: of each cell, as from `read_kept_tokens`.
    """
    frame = group.frame
    overlays = overlay_data(entries)
    needed = needs_by_question(entries)
    parts, tests, scale = headrooms(frame), against_full(frame), score_scale(frame)
    best = best_of_sizes(frame, scale)
    varied = varied_options([cell["protocol"] for cell in group.cells])
    marks, cells = markers(dict(zip(frame["series"], frame["method"], strict=True))), []
    for index, row in enumerate(frame.itertuples()):
        cells.append(
            {
                **cell_data(row),
                "marker": marks[row.series],
                "is_best": best[index],
                "options": varied[index],
                "against": test_data(tests.iloc[index]),
                "same": number(row.loyalty),
                "headroom": None if parts[index] is None else [*astuple(parts[index])],
                "per_layer": row.per_layer,
                "per_head": mean_shares(entries[index]),
                "needs_kept": mean_needs_kept(entries[index], needed),
            }
        )
    every = pd.concat(frame["questions"].tolist())
    every = every[~every.index.duplicated()].sort_index()
    of_cells = {
        name: pd.concat([own[name] for own in frame["questions"]], axis=1).reindex(every.index).astype(object)
        for name in ("answer", "score")
    }
    answers, scores = (values.where(values.notna(), None) for values in of_cells.values())
    questions = [
        {
            "key": f"{row.Index[0]}/{row.Index[1]}",
            "q": row.question,
            "gold": row.gold,
            "a": answers.loc[row.Index].tolist(),
            "s": scores.loc[row.Index].tolist(),
        }
        for row in every.head(MOST_QUESTIONS).itertuples()
    ]
    return {
        "title": group.title,
        "made": made(group.cells),
        "metric": frame["metric"].iloc[0] or "score",
        "scale": scale,
        "is_lower_better": bool(frame["is_lower_better"].any()),
        "draws": explanation(frame),
        "warning": "; ".join(filter(None, [warning(frame), *gate_lines(frame)])),
        "cells": cells,
        "all_questions": len(every),
        "questions": questions,
        "overlays": overlays,
    }


def cell_data(row: Any) -> dict[str, Any]:
    """Return what every page shows of a cell, from its row in the frame of a `Group`."""
    return {
        "series": row.series,
        "method": row.method,
        "size": row.asked,
        "kept": kept(row.realised, row.ratio, row.budget),
        "colour": colour(row.method),
        **{name: number(getattr(row, name)) for name in CELL_NUMBERS},
        "samples": int(row.samples),
    }


def made(cells: list[dict[str, Any]]) -> str:
    """Say on what device, when, and with which versions the cells were measured, listing all values that differ."""
    environments = [cell.get("environment", {}) for cell in cells]
    dates = sorted({str(cell["date"])[:10] for cell in cells if cell.get("date")})
    parts = [
        ("", [cell["protocol"]["model"] for cell in cells]),
        ("on ", [each["device"] for each in environments if "device" in each]),
        ("", [" to ".join(dict.fromkeys([dates[0], dates[-1]]))] if dates else []),
        *(
            (f"{name} ", [each["versions"][name] for each in environments if name in each.get("versions", {})])
            for name in ("kvcompress", "torch", "transformers", "lmms-eval")
        ),
    ]
    return ", ".join(before + " and ".join(dict.fromkeys(map(str, found))) for before, found in parts if found)


def varied_options(protocols: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each cell the options that vary among the cells of some method; values that are not numbers become
    text."""
    values: dict[tuple[str, str], set[str]] = {}
    for protocol in protocols:
        for name, value in protocol.get("options", {}).items():
            values.setdefault((protocol["method"], name), set()).add(str(value))
    names = {name for (_, name), found in values.items() if len(found) > 1}
    return [
        {
            name: value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
            for name, value in protocol.get("options", {}).items()
            if name in names
        }
        for protocol in protocols
    ]


def _entries(folder: Path, images: dict[str, str | None]) -> list[dict[str, Any]]:
    """Return the kept tokens of a cell's questions, and add their images to `images`, None for a missing one. Files
    that cannot be read are left out, each with a line."""
    try:
        entries = read_kept_tokens(folder)
    except DamagedFile as error:
        leave_out(folder, error)
        return []
    for image in (image for entry in entries for image in entry["images"] if "file" in image):
        file = image["file"]
        if file not in images:
            path = folder.parent / IMAGES_FOLDER / file
            try:
                images[file] = data_url(path.read_bytes())
            except OSError as error:
                leave_out(path, error.strerror)
                images[file] = None
        if images[file] is None:
            del image["file"]
    return entries


def overlay_data(entries: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return question -> its prompt and images, and under `cells` what each cell that recorded it kept.

    Args:
        entries: the entries of each cell, as from `read_kept_tokens`.
    """
    overlays: dict[str, Any] = {}
    for index, of_cell in enumerate(entries):
        for entry in of_cell:
            overlay = overlays.setdefault(
                f"{entry['task']}/{entry['doc_id']}",
                {**{name: entry[name] for name in ("layers", "kv_heads", "pieces", "images")}, "cells": {}},
            )
            overlay["cells"][index] = {"vision": entry["vision"], "text": entry["text"]}
    return overlays


TEST_NUMBERS = ("questions", "difference", "low", "high", "holm", "not_worse", "broken", "mended")


def test_data(row: pd.Series) -> dict[str, float] | None:
    """Return a row of `against`; None if nothing was compared."""
    if pd.isna(row["difference"]):
        return None
    return {**{name: number(row[name]) for name in TEST_NUMBERS}, "margin": MARGIN}


def same_answers(own: pd.DataFrame, full: pd.DataFrame) -> float | None:
    """Return the share of two cells' common questions that both answer alike; None if they have none in common."""
    both = pd.concat([own["answer"], full["answer"]], axis=1, keys=["own", "full"], join="inner")
    return loyalty(list(both["own"]), list(both["full"])) if len(both) else None


def mean_shares(entries: list[dict[str, Any]]) -> list[list[float]] | None:
    """Return the share of prompt tokens that each layer and KV head kept, [layer][head], averaged over the entries."""
    if not entries:
        return None
    return np.mean([shares(entry, "all") for entry in entries], axis=0).round(4).tolist()


def needs_by_question(entries: list[list[dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Return question -> `needs`, from the cells whose method looks ahead at the answer."""
    known = {}
    for entry in chain.from_iterable(entries):
        if (worth := needs(entry)) is not None:
            known[f"{entry['task']}/{entry['doc_id']}"] = worth
    return known


def mean_needs_kept(entries: list[dict[str, Any]], needed: dict[str, np.ndarray]) -> list[list[float]] | None:
    """Return the share of what answers need that each layer and KV head kept, [layer][head], averaged over the entries
    whose needs are known (`needs_by_question`)."""
    kept = [
        needs_kept(entry, needed[key]) for entry in entries if (key := f"{entry['task']}/{entry['doc_id']}") in needed
    ]
    return np.mean(kept, axis=0).round(4).tolist() if kept else None


def data_url(jpeg: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


def number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
