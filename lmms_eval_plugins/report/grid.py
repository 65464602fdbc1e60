"""Compare a grid of cells on disk with the full cache: metrics, curves, and paired comparisons."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from kvcompress import KVCompressError

from ..cells.errors import UsageError
from ..cells.results import RESULTS_FILE
from .against import MARGIN, against
from .appearance import score_scale
from .draws import pooled
from .groups import grouped, read_cells
from .headline import headline, why_none
from .metrics import (
    Headroom,
    area_under_curve,
    fastest,
    headroom,
    loyalty,
    overall_generalisation,
    overall_performance,
    relative_scores,
    smallest_ratio,
    speed_up,
)
from .numbers import kept, near, share
from .table import KEPT, title_of

GROUP = ["task", "model", "settings"]  # only cells of one group are compared with each other


def load_grid(
    folders: Sequence[Path],
    metric: str | None = None,
    metric_filter: str | None = None,
    cluster: str | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Load the cells of folders (results/<task>/<model>) and compute their metrics against the full cache.

    Args:
        metric, metric_filter: the metric and answer filter to compare; default: the task's main ones.
        cluster: the field that tells which questions belong together, see `cluster_of`.

    Returns:
        A frame with one row per cell, or for all draws of one (see `pooled`). Its columns are those of
        `table.sweep_frame`, but `size` is text (`0.2`, `budget=64`), and `questions` (see `groups.question_frame`),
        `full` (the full cache's score), `relative`, `loyalty`, `speed_up`.
        A line for each thing left out: a damaged cell, one without a score, or a set of settings without a cell of the
        full cache that scores above 0, by a metric of which more is better.
        If a cell answered other questions than the full cache, `relative`, `loyalty` and `speed_up` are of those that
        both answered.

    Raises:
        UsageError: a folder without cells, nothing but what is left out, or a question without the field `cluster`.
        KVCompressError: a cell that shares no question with the full cache.
    """
    cells, left_out = [], []
    for folder in dict.fromkeys(map(Path, folders)):
        own, damaged = read_cells(folder, directly=True)
        if not own and not damaged:
            raise UsageError(f"no finished cell under {str(folder)!r} (expected <method>-<ratio>/{RESULTS_FILE})")
        cells += own
        left_out += [f"{path}: {error}" for path, error in damaged.items()]
    if not cells:
        raise UsageError(left_out[0])
    scored = []
    for cell in cells:
        if headline(cell, metric, metric_filter) is not None:
            scored.append(cell)
        else:
            left_out.append(f"{cell['folder']} has {why_none(cell, metric, metric_filter)}")
    grids = []
    for group in grouped(scored, metric, metric_filter, cluster):
        first, title = group.frame.iloc[0], title_of(group.frame[GROUP].iloc[0])
        if first["method"] != "full":
            left_out.append(
                f"{title}: no cell of the full cache to compare with; run the same command with METHOD full too"
            )
        elif first["is_lower_better"]:
            left_out.append(f"{title}: {first['metric']}, but what is lost here is of scores of which more is better")
        elif first["score"] <= 0:
            left_out.append(f"{title}: the full cache scores {first['score']:g}: a share of that is meaningless")
        else:
            grids.append(_against_full(group.frame))
    if not grids:
        raise UsageError(left_out[-1])
    return pd.concat(grids, ignore_index=True), left_out


def _against_full(group: pd.DataFrame) -> pd.DataFrame:
    group = group.sort_values(["order", "series", "kept"], ascending=[True, True, False])
    group = group.assign(size=group["asked"].str.replace(" ", "=")).drop(columns="order")
    first = group.iloc[0]
    full, relative, loyal, faster = first["questions"], [], [], []
    for row in group.itertuples():
        common = row.questions.index.intersection(full.index)
        own, other = row.questions.loc[common], full.loc[common]
        if own.empty:
            raise KVCompressError(f"{row.task}: {row.series} at {row.size} shares no question with the full cache")
        is_same = len(own) == len(row.questions) == len(full)
        scores = (row.score, first["score"]) if is_same else (own["score"].mean(), other["score"].mean())
        relative.append(float(relative_scores([scores[0]], [scores[1]])[0]))
        loyal.append(loyalty(list(own["answer"]), list(other["answer"])))
        faster.append(speed_up(own["seconds"], other["seconds"]))
    group = pooled(group.assign(full=first["score"], relative=relative, loyalty=loyal, speed_up=faster))
    parts = headrooms(group)
    return group.assign(
        headroom=[found.part if found else math.nan for found in parts],
        headroom_low=[found.low if found else math.nan for found in parts],
        headroom_high=[found.high if found else math.nan for found in parts],
    )


def headrooms(cells: pd.DataFrame) -> list[Headroom | None]:
    """Return each cell's headroom between `random` and `hindsight` at the same requested size.

    None if there is not exactly one cell of each, if they keep a different share than the cell, if one of the three
    answered different questions, or if the metric is not a number per question.

    Args:
        cells: the cells of one task, model and settings, with the columns `method`, `size`, `kept` and `questions`
            (frames by question, with `score` and `cluster`).
    """
    rulers = {name: cells[cells["method"] == name] for name in ("random", "hindsight")}
    parts: list[Headroom | None] = []
    for row in cells.itertuples():
        between = [of_ruler[of_ruler["size"] == row.size] for of_ruler in rulers.values()]
        is_alike = all(len(found) == 1 and near(row.kept, found["kept"].iloc[0]) for found in between)
        if row.method == "full" or not is_alike:
            parts.append(None)
            continue
        scores = [of_cell["score"] for of_cell in (row.questions, *(found["questions"].iloc[0] for found in between))]
        is_fair = len(row.questions) > 0 and all(
            of_cell.index.equals(row.questions.index) and of_cell.notna().all() for of_cell in scores
        )
        parts.append(headroom(*scores, row.questions["cluster"]) if is_fair else None)
    return parts


def curves(grid: pd.DataFrame, points: float, lowest: float | None = None) -> pd.DataFrame:
    """Return for each series the area under its curve, its smallest ratio, and the answers per second and mean tokens
    of an answer of its fastest cell that loses at most `points`, beside the full cache's. All areas of one task begin
    at the same share.

    Args:
        lowest: where the areas begin; default: the smallest share that all series of the task reach. Series that keep a
            different share than requested do not count for this, and have no area if they keep more.
    """
    rows = []
    for key, group in grid[~grid["method"].isin(["full", "blind"])].groupby(GROUP):  # those have a single size
        start = _lowest_of_all(group) if lowest is None else lowest
        everything = grid[(grid[GROUP] == list(key)).all(axis=1)]
        scale, full = score_scale(everything), everything[everything["method"] == "full"].iloc[0]
        for series, cells in group.groupby("series"):
            timed = cells[cells["answers_per_s"].notna()]
            speed = fastest(timed["answers_per_s"], timed["score"] * scale, full["score"] * scale, points)
            lengths = [of_cell["tokens_out"].mean() for of_cell in timed["questions"][timed["answers_per_s"] == speed]]
            reaches = cells["kept"].min() <= start + 1e-9 and (start < 1 or lowest is not None)
            rows.append(
                {
                    **dict(zip(GROUP, key, strict=True)),
                    "series": series,
                    "from": start,
                    "area": area_under_curve(cells["kept"], cells["relative"], start) if reaches else math.nan,
                    "points": points,
                    "smallest": smallest_ratio(cells["kept"], cells["score"] * scale, full["score"] * scale, points),
                    "answers_per_s": speed,
                    "tokens_out": min(lengths, default=None),
                    "full_answers_per_s": full["answers_per_s"],
                    "full_tokens_out": full["questions"]["tokens_out"].mean(),
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


def paired_tests(
    grid: pd.DataFrame, reference: str | None = None, margin: float = MARGIN, only: str | None = None
) -> pd.DataFrame:
    """Test every compressed cell of a grid against the reference of the same size; the full cache matches every size.

    Args:
        reference: a series as the table names it, or a method with a single series; default: the full cache.
        margin: the loss that does not matter, in points.
        only: the one series to test, instead of all.

    Returns:
        A row per test: GROUP; `a` and `b`, the cell and its reference with their sizes; `series`, `kept (asked)`,
        `answered` of the cell; and what `against` returns. Holm's method corrects the tests of one group.

    Raises:
        UsageError: an unknown name, or no size in common.
        KVCompressError: with `only`, a metric that is not a number per question.
    """
    parts = []
    for key, group in grid.groupby(GROUP):
        theirs = _series(group, reference or group["series"].iloc[0])
        others = group[(group["series"] != theirs["series"].iloc[0]) & (group["method"] != "full")]
        ours = others if only is None else _series(group, only)
        has_full = "full" in {*theirs["method"], *ours["method"]}
        pairs = [
            (own, other)
            for own, other in product(ours.itertuples(), theirs.itertuples())
            if has_full or own.size == other.size
        ]
        found = against([(own.questions, other.questions) for own, other in pairs], margin)
        if only is not None and found["difference"].isna().any():
            raise KVCompressError(
                f"{key[0]}: {ours['metric'].iloc[0]} has no score per question, so it cannot be paired"
            )
        labels = [
            {
                **dict(zip(GROUP, key, strict=True)),
                **{name: f"{of.series} {of.size}{_other_share(of)}" for name, of in (("a", own), ("b", other))},
                "series": own.series,
                KEPT: kept(own.realised, own.ratio, own.budget),
                "answered": len(own.questions),
            }
            for own, other in pairs
        ]
        parts.append(pd.concat([pd.DataFrame(labels), found], axis=1))
    if not any(map(len, parts)):
        raise UsageError(f"{only or 'any other series'!r} and {reference!r} have no size in common")
    return pd.concat(parts, ignore_index=True)


def _other_share(cell: Any) -> str:
    """Return what a cell kept, as text, if it differs from what was requested."""
    return "" if near(cell.kept, cell.ratio) else f" (kept {share(cell.kept)})"


def _series(group: pd.DataFrame, name: str) -> pd.DataFrame:
    cells = group[group["series"] == name]
    cells = group[group["method"] == name] if cells.empty else cells
    if cells["series"].nunique() != 1:
        names = ", ".join(repr(series) for series in group["series"].unique())
        which = "names several series" if len(cells) else "is not a series"
        raise UsageError(f"{name!r} {which} of {group['task'].iloc[0]}; the series are: {names}")
    return cells
