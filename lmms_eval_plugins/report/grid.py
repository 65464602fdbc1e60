"""Compare a grid of cells on disk with the full cache: metrics, curves, and paired comparisons."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcompress import KVCompressError

from ..cells.errors import UsageError
from ..cells.results import RESULTS_FILE, DamagedFile, exact, read_cell
from .headline import Headline, by_question, headline, seconds
from .metrics import (
    Headroom,
    area_under_curve,
    fastest,
    headroom,
    loyalty,
    overall_generalisation,
    overall_performance,
    paired_bootstrap,
    relative_scores,
    smallest_ratio,
    speed_up,
)
from .numbers import near, share
from .table import cell_row, score_scale

GROUP = ["task", "model", "settings"]  # only cells of one group are compared with each other


def load_grid(
    folders: Sequence[Path], metric: str | None = None, metric_filter: str | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Load the cells of folders (results/<task>/<model>) and compute their metrics against the full cache.

    Args:
        metric, metric_filter: the metric and answer filter to compare; default: the task's main ones.

    Returns:
        A frame with one row per cell. Its columns are those of `table.cell_row`, and `model`, `kept` (the realised
        share of the KV entries), `size` (what was requested, as text: `0.2`, `budget=64`), `full` (the full cache's
        score), `relative`, `loyalty`, `speed_up`, `questions` (see `question_frame`).
        A line for each thing left out: a damaged cell, or a set of settings without a cell of the full cache.

    Raises:
        UsageError: a folder without cells, or no full cache at all.
        KVCompressError: a cell without a score, or one that answered different questions than the full cache.
    """
    rows, left_out = [], []
    for folder in folders:
        files = sorted(Path(folder).glob(f"[!.]*/{RESULTS_FILE}"))
        if not files:
            raise UsageError(f"no finished cell under {str(folder)!r} (expected <method>-<ratio>/{RESULTS_FILE})")
        for file in files:
            try:
                cell, samples = read_cell(file.parent)
            except (DamagedFile, FileNotFoundError) as error:
                left_out.append(f"{file.parent}: {error}")
                continue
            row = cell_row(cell, metric, metric_filter)
            if row["score"] is None:
                raise KVCompressError(f"{file.parent} has no score (was it run with --predict_only?)")
            row["kept"] = row["ratio"] if row["realised"] is None else row["realised"]
            row["size"] = f"budget={row['budget']}" if row["ratio"] is None else exact(row["ratio"])
            row["model"] = cell["protocol"]["model"]
            questions = question_frame(cell, samples, headline(cell, metric, metric_filter))
            rows.append({**row, "questions": questions})
    if not rows:
        raise UsageError(left_out[0])
    grids = []
    for (task, model, settings), group in pd.DataFrame(rows).groupby(GROUP):
        if (group["method"] == "full").any():
            grids.append(_against_full(group))
        else:
            which = f"{task}, {model}" + (f" ({settings})" if settings else "")
            left_out.append(
                f"{which}: no cell of the full cache to compare with; run the same command with METHOD full too"
            )
    if not grids:
        raise UsageError(left_out[-1])
    return pd.concat(grids, ignore_index=True), left_out


def question_frame(cell: dict[str, Any], samples: list[dict[str, Any]], found: Headline | None) -> pd.DataFrame:
    """Return a cell's questions with columns `answer`, `score` (NaN if the metric has none per question) and `seconds`.

    The index is (task, doc_id), sorted.
    """
    rows = [
        {
            "task": sample["task"],
            "doc_id": sample["doc_id"],
            "answer": tuple(str(answer).strip() for answer in np.ravel(sample["filtered_resps"])),
            "score": score,
            "seconds": seconds(sample),
        }
        for sample, score in by_question(cell, samples, found)
    ]
    return pd.DataFrame(rows).set_index(["task", "doc_id"]).sort_index()


def _against_full(group: pd.DataFrame) -> pd.DataFrame:
    group = group.assign(is_full=group["method"] == "full").sort_values(
        ["is_full", "series", "kept"], ascending=[False, True, False]
    )
    first = group.iloc[0]
    full = first["questions"]
    for row in group.itertuples():
        if not row.questions.index.equals(full.index):
            raise KVCompressError(
                f"{row.task}: {row.series} at {row.size} answered different questions than the full cache"
            )
    questions = group["questions"]
    parts = headrooms(group.assign(scores=[of_cell["score"] for of_cell in questions]))
    return group.drop(columns="is_full").assign(
        full=first["score"],
        relative=relative_scores(group["score"], [first["score"]]),
        loyalty=[loyalty(list(cell["answer"]), list(full["answer"])) for cell in questions],
        speed_up=[speed_up(cell["seconds"], full["seconds"]) for cell in questions],
        headroom=[found.part if found else math.nan for found in parts],
        headroom_low=[found.low if found else math.nan for found in parts],
        headroom_high=[found.high if found else math.nan for found in parts],
    )


def headrooms(cells: pd.DataFrame) -> list[Headroom | None]:
    """Return each cell's headroom between `random` and `hindsight` at the same requested size.

    None if there is not exactly one cell of each, if they keep a different share than the cell, if one of the three
    answered different questions, or if the metric is not a number per question.

    Args:
        cells: the cells of one task, model and settings, with the columns `method`, `size`, `kept` and `scores` (a
            Series by question).
    """
    rulers = {name: cells[cells["method"] == name] for name in ("random", "hindsight")}
    parts: list[Headroom | None] = []
    for row in cells.itertuples():
        between = [of_ruler[of_ruler["size"] == row.size] for of_ruler in rulers.values()]
        if row.method == "full" or any(
            len(found) != 1 or not near(row.kept, found["kept"].iloc[0]) for found in between
        ):
            parts.append(None)
            continue
        scores = [row.scores, *(found["scores"].iloc[0] for found in between)]
        is_fair = len(row.scores) > 0 and all(
            of_cell.index.equals(row.scores.index) and of_cell.notna().all() for of_cell in scores
        )
        parts.append(headroom(*scores) if is_fair else None)
    return parts


def curves(grid: pd.DataFrame, points: float, lowest: float | None = None) -> pd.DataFrame:
    """Return for each series the area under its curve, its smallest ratio, and the answers per second of its fastest
    cell that loses at most `points`, beside the full cache's. All areas of one task begin at the same share.

    Args:
        lowest: where the areas begin; default: the smallest share that all series of the task reach. Series that keep a
            different share than requested do not count for this, and have no area if they keep more.
    """
    rows = []
    for key, group in grid[grid["method"] != "full"].groupby(GROUP):
        start = _lowest_of_all(group) if lowest is None else lowest
        everything = grid[(grid[GROUP] == list(key)).all(axis=1)]
        scale, full = score_scale(everything), everything[everything["method"] == "full"].iloc[0]
        for series, cells in group.groupby("series"):
            reaches = cells["kept"].min() <= start + 1e-9 and (start < 1 or lowest is not None)
            rows.append(
                {
                    **dict(zip(GROUP, key, strict=True)),
                    "series": series,
                    "from": start,
                    "area": area_under_curve(cells["kept"], cells["relative"], start) if reaches else math.nan,
                    "points": points,
                    "smallest": smallest_ratio(cells["kept"], cells["score"] * scale, full["score"] * scale, points),
                    "answers_per_s": fastest(
                        cells["answers_per_s"].dropna(),
                        (cells["score"] * scale)[cells["answers_per_s"].notna()],
                        full["score"] * scale,
                        points,
                    ),
                    "full_answers_per_s": full["answers_per_s"],
                }
            )
    return pd.DataFrame(rows)


def _lowest_of_all(cells: pd.DataFrame) -> float:
    as_asked = [near(row.kept, row.ratio) for row in cells.itertuples()]
    least = cells[as_asked] if any(as_asked) else cells
    return float(least.groupby("series")["kept"].min().max())


def overall(grid: pd.DataFrame) -> pd.DataFrame:
    """Return OP, OG, OL and OE of each series and ratio over the tasks that have it, with means and minima."""
    rows = []
    compressed = grid[grid["method"] != "full"]
    sizes = ["model", "settings", "series", "size"]
    for key, cells in compressed.groupby(sizes, sort=False):
        relative = cells["relative"]
        rows.append(
            {
                **dict(zip(sizes, key, strict=True)),
                "ratio": cells["ratio"].iloc[0],
                "budget": cells["budget"].iloc[0],
                "kept": cells["kept"].mean(),
                "tasks": list(cells["task"]),
                "op": overall_performance(relative),
                "mean": relative.mean(),
                "min": relative.min(),
                "og": overall_generalisation(relative) if relative.any() else math.nan,
                "ol": cells["loyalty"].mean(),
                "ol_min": cells["loyalty"].min(),
                "oe": cells["speed_up"].mean(),
                "oe_min": cells["speed_up"].min(),
            }
        )
    return pd.DataFrame(rows)


def compare(grid: pd.DataFrame, a: str, b: str, resamples: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """Compare series A with series B on the same questions, at each ratio that both have.

    Args:
        a, b: a series as the table names it, or a method with a single series. The full cache matches every ratio.

    Raises:
        UsageError: an unknown name, or no ratio in common.
        KVCompressError: the metric is not a number per question.
    """
    rows = []
    for key, group in grid.groupby(GROUP):
        ours, theirs = _series(group, a), _series(group, b)
        is_full = "full" in (ours["method"].iloc[0], theirs["method"].iloc[0])
        pairs = ours.merge(theirs, **({"how": "cross"} if is_full else {"on": "size"}), suffixes=("_a", "_b"))
        for pair in pairs.itertuples():
            scores = [pair.questions_a["score"], pair.questions_b["score"]]
            if any(score.isna().any() for score in scores):
                raise KVCompressError(
                    f"{pair.task_a}: {pair.metric_a} has no score per question, so it cannot be paired"
                )
            sizes = [pair.size_a, pair.size_b] if is_full else [pair.size, pair.size]
            found = paired_bootstrap(*scores, resamples, seed)
            labels = {
                "a": f"{pair.series_a} {sizes[0]}" + _other_share(pair.kept_a, pair.ratio_a),
                "b": f"{pair.series_b} {sizes[1]}" + _other_share(pair.kept_b, pair.ratio_b),
            }
            rows.append({**dict(zip(GROUP, key, strict=True)), **labels, **asdict(found)})
    if not rows:
        raise UsageError(f"{a!r} and {b!r} have no ratio in common")
    return pd.DataFrame(rows)


def _other_share(kept: float, ratio: float | None) -> str:
    """Return what was kept, as text, if it differs from what was requested."""
    return "" if near(kept, ratio) else f" (kept {share(kept)})"


def _series(group: pd.DataFrame, name: str) -> pd.DataFrame:
    cells = group[group["series"] == name]
    cells = group[group["method"] == name] if cells.empty else cells
    if cells["series"].nunique() != 1:
        names = ", ".join(repr(series) for series in group["series"].unique())
        which = "names several series" if len(cells) else "is not a series"
        raise UsageError(f"{name!r} {which} of {group['task'].iloc[0]}; the series are: {names}")
    return cells
