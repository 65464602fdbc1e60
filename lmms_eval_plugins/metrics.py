"""Metrics of a grid: `python -m lmms_eval_plugins.metrics results/<task>/<model> ... [--compare A B] [--json]`.

Each function below is plain arithmetic on lists of numbers; `docs/metrics.md` defines them. OP, OG, OL and OE are
EffiVLM-Bench's (https://arxiv.org/abs/2506.00479) as secondary sources transcribe them: the paper's own formulas were
not at hand.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from kvcompress import KVCompressError

from .cells.errors import UsageError
from .cells.results import RESULTS_FILE, SAMPLES_FILE, dumps
from .report import cell_row, headline_metric, score_scale

Numbers = Sequence[float] | np.ndarray | pd.Series


# -- over benchmarks


def relative_scores(scores: Numbers, full: Numbers) -> np.ndarray:
    """Score over the full cache's, per benchmark. Raises KVCompressError where the full cache's is not above 0."""
    scores, full = np.asarray(scores, float), np.asarray(full, float)
    if (full <= 0).any():
        raise KVCompressError(f"the full cache scores {full.min():g}: a share of that has no meaning")
    return scores / full


def overall_performance(relative: Numbers) -> float:
    """OP: root mean square over benchmarks of score / full score. It rewards variance: read mean and minimum, too."""
    return float(np.sqrt(np.mean(np.square(np.asarray(relative, float)))))


def overall_generalisation(relative: Numbers) -> float:
    """OG: standard deviation over mean of score / full score, over benchmarks (deviation of the population: divided by
    their number). Lower is better; 0 for a single benchmark. Raises KVCompressError where all scores are 0."""
    relative = np.asarray(relative, float)
    if relative.mean() == 0:
        raise KVCompressError("OG is undefined: all scores are 0")
    return float(relative.std() / relative.mean())


# -- over the questions of one benchmark


def loyalty(answers: Sequence[Any], full: Sequence[Any]) -> float:
    """OL: share of the questions with the full cache's own answer, right or wrong; both in the same order."""
    if len(answers) != len(full) or not len(full):
        raise KVCompressError(f"loyalty compares the same questions, not {len(answers)} with {len(full)}")
    return sum(answer == other for answer, other in zip(answers, full, strict=True)) / len(full)


def speed_up(seconds: Numbers, full: Numbers) -> float:
    """OE: seconds for all answers with the full cache, over those with the compressed one."""
    return float(np.sum(full) / np.sum(seconds))


@dataclass(frozen=True)
class Comparison:
    """Mean score of A minus that of B on the same questions, with 95 % interval and two-sided p-value."""

    questions: int
    difference: float
    low: float
    high: float
    p_value: float


def paired_bootstrap(a: Numbers, b: Numbers, resamples: int = 10_000, seed: int = 0) -> Comparison:
    """Compares two methods on the same questions, by drawing questions again, with replacement.

    The interval is the percentiles 2.5 and 97.5 of the resampled mean differences. The p-value is the share of them
    that lie at least as far from the observed difference as that lies from 0 (the bootstrap moved to no difference;
    Efron and Tibshirani 1993, chapter 16), with one added to both counts, so that it is never 0.

    Args:
        a, b: scores of the questions, in the same order, (questions,).

    Raises:
        KVCompressError: not the same number of questions, or none.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    if len(a) != len(b) or not len(a):
        raise KVCompressError(f"a paired comparison needs the same questions, not {len(a)} and {len(b)}")
    differences, generator = a - b, np.random.default_rng(seed)
    # One draw after the other: all at once would be resamples x questions numbers.
    means = np.array([generator.choice(differences, len(differences)).mean() for _ in range(resamples)])
    observed = differences.mean()
    extreme = np.count_nonzero(np.abs(means - observed) >= abs(observed) - 1e-12)
    low, high = np.percentile(means, [2.5, 97.5])
    return Comparison(len(a), float(observed), float(low), float(high), (extreme + 1) / (resamples + 1))


# -- over the ratios of one method


def area_under_curve(ratios: Numbers, relative: Numbers, lowest: float) -> float:
    """Mean of score / full score between the ratio `lowest` and 1, on a logarithmic axis of the ratio.

    Halving the ratio counts the same everywhere. Trapezoids between the measured points; the curve ends in the full
    cache, (1, 1). 1 means: as good as the full cache everywhere.

    Raises:
        KVCompressError: no ratio as small as `lowest` was measured, or `lowest` is not in (0, 1).
    """
    order = np.argsort(ratios)
    ratios, relative = np.asarray(ratios, float)[order], np.asarray(relative, float)[order]
    if not 0 < lowest < 1:
        raise KVCompressError(f"the area starts at a ratio in (0, 1), not at {lowest:g}")
    if ratios[0] > lowest + 1e-9:
        raise KVCompressError(
            f"the area from ratio {lowest:g} needs a score there; the smallest ratio is {ratios[0]:g}"
        )
    x, y = np.append(np.log(ratios), 0.0), np.append(relative, 1.0)
    start = math.log(lowest)
    inside = x > start
    y = np.append(np.interp(start, x, y), y[inside])
    x = np.append(start, x[inside])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / -start)


def smallest_ratio(ratios: Numbers, scores: Numbers, full: float, points: float) -> float:
    """The smallest measured ratio that costs at most `points` of score, as does every larger one measured.

    No interpolation: a ratio is named only where it was measured. 1, the full cache, where none will do.
    """
    best = 1.0
    for ratio, score in sorted(zip(ratios, scores, strict=True), reverse=True):
        if score < full - points - 1e-9:
            break
        best = min(best, float(ratio))
    return best


# -- cells on disk


def read_samples(folder: Path, metric: str | None) -> pd.DataFrame:
    """A cell's questions: `answer`, `score` (NaN where the metric has none per question), `seconds` of the answer.

    The index is (task, doc_id), sorted.
    """
    rows = []
    with open(folder / SAMPLES_FILE, encoding="utf-8") as file:
        for sample in map(json.loads, file):
            measured, score = sample["measurement"], sample.get((metric or "").split(",")[0])
            rows.append(
                {
                    "task": sample["task"],
                    "doc_id": sample["doc_id"],
                    "answer": tuple(str(answer).strip() for answer in np.ravel(sample["filtered_resps"])),
                    "score": float(score) if isinstance(score, int | float) else math.nan,
                    "seconds": measured["ttft_s"] + (measured["tpot_s"] or 0) * (measured["tokens_out"] - 1),
                }
            )
    # A task with several answer filters has a line for each; the first is that of the headline metric.
    return pd.DataFrame(rows).drop_duplicates(["task", "doc_id"]).set_index(["task", "doc_id"]).sort_index()


def load_grid(folders: Sequence[Path]) -> tuple[pd.DataFrame, list[str]]:
    """One row per cell of the folders (results/<task>/<model>), with what the functions above say of it; and a line for
    each set of settings that is left out, because it has no cell of the full cache to compare with.

    Columns: those of `report.cell_row`, and `task`, `model`, `kept` (the ratio, or the realised one of a budget),
    `size` (the same as text: `0.2`, `budget=64`), `full` (the full cache's score), `relative`, `loyalty`, `speed_up`,
    `questions` (see `read_samples`).

    Raises:
        UsageError: a folder without cells, or no full cache at all. KVCompressError: a cell without a score.
    """
    rows = []
    for folder in folders:
        files = sorted(Path(folder).glob(f"[!.]*/{RESULTS_FILE}"))
        if not files:
            raise UsageError(f"no finished cell under {str(folder)!r} (expected <method>-<ratio>/{RESULTS_FILE})")
        for file in files:
            cell = json.loads(file.read_text(encoding="utf-8"))
            row = cell_row(cell)
            if row["score"] is None:
                raise KVCompressError(f"{file.parent} has no score (was it run with --predict_only?)")
            row["kept"] = row["realised"] if row["ratio"] is None else row["ratio"]
            row["size"] = f"budget={row['budget']}" if row["ratio"] is None else f"{row['ratio']:g}"
            row |= {"task": cell["protocol"]["task"], "model": cell["protocol"]["model"]}
            rows.append({**row, "questions": read_samples(file.parent, headline_metric(cell))})
    grids, left_out = [], []
    for (task, model, settings), group in pd.DataFrame(rows).groupby(GROUP):
        if (group["method"] == "full").any():
            grids.append(_against_full(group))
        else:
            which = f"{task}, {model}" + (f" ({settings})" if settings else "")
            left_out.append(
                f"{which}: no cell of the full cache to compare with; run the same command with METHOD full"
            )
    if not grids:
        raise UsageError(left_out[0])
    return pd.concat(grids, ignore_index=True), left_out


GROUP = ["task", "model", "settings"]


def _against_full(group: pd.DataFrame) -> pd.DataFrame:
    group = group.assign(is_full=group["method"] == "full").sort_values(
        ["is_full", "series", "kept"], ascending=[False, True, False]
    )
    first = group.iloc[0]
    full = first["questions"]
    for row in group.itertuples():
        if not row.questions.index.equals(full.index):
            raise KVCompressError(
                f"{row.task}: {row.series} at {row.kept:g} answered other questions than the full cache"
            )
    questions = group["questions"]
    return group.drop(columns="is_full").assign(
        full=first["score"],
        relative=relative_scores(group["score"], [first["score"]]),
        loyalty=[loyalty(list(cell["answer"]), list(full["answer"])) for cell in questions],
        speed_up=[speed_up(cell["seconds"], full["seconds"]) for cell in questions],
    )


def curves(grid: pd.DataFrame, points: float, lowest: float | None = None) -> pd.DataFrame:
    """Area and smallest ratio of each series; the areas of one task begin at the same ratio.

    Args:
        lowest: where the areas begin; the smallest ratio that all series of the task have where None.
    """
    rows = []
    for key, group in grid[grid["method"] != "full"].groupby(GROUP):
        start = group.groupby("series")["kept"].min().max() if lowest is None else lowest
        scale = score_scale(grid[(grid[GROUP] == list(key)).all(axis=1)])
        for series, cells in group.groupby("series"):
            reaches = cells["kept"].min() <= start + 1e-9 and (start < 1 or lowest is not None)
            rows.append(
                {
                    **dict(zip(GROUP, key, strict=True)),
                    "series": series,
                    "from": start,
                    "area": area_under_curve(cells["kept"], cells["relative"], start) if reaches else math.nan,
                    "points": points,
                    "smallest": smallest_ratio(
                        cells["kept"], cells["score"] * scale, cells["full"].iloc[0] * scale, points
                    ),
                }
            )
    return pd.DataFrame(rows)


def overall(grid: pd.DataFrame) -> pd.DataFrame:
    """OP, OG, OL and OE of each series and ratio, over the tasks that have it, with means and minima."""
    rows = []
    compressed = grid[grid["method"] != "full"]
    sizes = ["model", "settings", "series", "size"]
    for key, cells in compressed.groupby(sizes, sort=False):
        relative = cells["relative"]
        rows.append(
            {
                **dict(zip(sizes, key, strict=True)),
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
    """Series A against series B on the same questions, at each ratio that both have (the full cache has all).

    Args:
        a, b: a series as the table names it, or a method with a single series.

    Raises:
        UsageError: a name that is not there, or no ratio that both have.
        KVCompressError: the metric is no number per question.
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
                    f"{pair.task_a}: {pair.metric_a} is no number per question, so it cannot be paired"
                )
            sizes = [pair.size_a, pair.size_b] if is_full else [pair.size, pair.size]
            found = paired_bootstrap(*scores, resamples, seed)
            labels = {"a": f"{pair.series_a} {sizes[0]}", "b": f"{pair.series_b} {sizes[1]}"}
            rows.append({**dict(zip(GROUP, key, strict=True)), **labels, **asdict(found)})
    if not rows:
        raise UsageError(f"{a!r} and {b!r} have no ratio in common")
    return pd.DataFrame(rows)


def _series(group: pd.DataFrame, name: str) -> pd.DataFrame:
    cells = group[group["series"] == name]
    cells = group[group["method"] == name] if cells.empty else cells
    if cells["series"].nunique() != 1:
        names = ", ".join(repr(series) for series in group["series"].unique())
        which = "names several series" if len(cells) else "is no series"
        raise UsageError(f"{name!r} {which} of {group['task'].iloc[0]}; there are: {names}")
    return cells


# -- the command


def _percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}"


def tables(grid: pd.DataFrame, lines: pd.DataFrame, summary: pd.DataFrame, comparisons: pd.DataFrame) -> list[Table]:
    """The same numbers for the terminal, formatted."""
    found = []
    for (task, model, settings), group in grid.groupby(GROUP):
        title = f"{task}, {model}" + (f" ({settings})" if settings else "")
        scale = score_scale(group)
        cells = Table(title=title)
        for column in ("method", "ratio kept", group["metric"].iloc[0], "of full", "loyalty", "speed-up"):
            cells.add_column(column, justify="left" if column == "method" else "right")
        for row in group.itertuples():
            values = [_percent(row.relative) + " %", _percent(row.loyalty) + " %", f"{row.speed_up:.2f}x"]
            cells.add_row(row.series, row.size, f"{scale * row.score:.1f}", *values)
        found.append(cells)
        own = lines[(lines[GROUP] == [task, model, settings]).all(axis=1)] if len(lines) else lines
        if len(own):
            first = own.iloc[0]
            curve = Table(caption=f"Area: mean of score / full score from ratio {first['from']:g} to 1, logarithmic.")
            curve.add_column("method")
            curve.add_column("area", justify="right")
            curve.add_column(f"smallest ratio within {first['points']:g} points", justify="right")
            for row in own.itertuples():
                curve.add_row(row.series, _percent(row.area) + " %", f"{row.smallest:g}")
            found.append(curve)
    if any(len(tasks) > 1 for tasks in summary.get("tasks", [])):
        across = Table(
            title="All tasks", caption="OP: root mean square of score / full score; OG: its deviation / mean."
        )
        for column in ("model", "method", "ratio kept", "tasks", "OP", "mean", "min", "OG", "OL", "min", "OE", "min"):
            across.add_column(column, justify="left" if column in ("model", "method") else "right")
        for row in summary.itertuples():
            shares = [_percent(value) for value in (row.op, row.mean, row.min, row.og, row.ol, row.ol_min)]
            name = row.model + (f" ({row.settings})" if row.settings else "")
            across.add_row(
                name, row.series, row.size, str(len(row.tasks)), *shares, f"{row.oe:.2f}x", f"{row.oe_min:.2f}x"
            )
        found.append(across)
    if len(comparisons):
        paired = Table(title="A - B on the same questions, in units of the score; paired bootstrap")
        for column in ("task", "A", "B", "questions", "difference", "95 % interval", "p"):
            paired.add_column(column, justify="left" if column in ("task", "A", "B") else "right")
        for row in comparisons.itertuples():
            interval = f"[{row.low:+.3f}, {row.high:+.3f}]"
            paired.add_row(
                row.task, row.a, row.b, str(row.questions), f"{row.difference:+.3f}", interval, f"{row.p_value:.4f}"
            )
        found.append(paired)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lmms_eval_plugins.metrics", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="results/TASK/MODEL", help="one folder per task, of the same model")
    add("--compare", nargs=2, metavar=("A", "B"), help="paired bootstrap of two methods (or one and `full`)")
    add("--points", type=float, default=1, help="for the smallest ratio that costs at most so many points (1)")
    add("--from", type=float, dest="lowest", metavar="RATIO", help="where the area under the curve begins")
    add("--resamples", type=int, default=10_000, help="of the bootstrap (10000)")
    add("--seed", type=int, default=0, help="of the bootstrap (0)")
    add("--json", action="store_true", help="print JSON in place of tables")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 2 with one line on stderr for bad input."""
    flags = _parser().parse_args(argv)
    try:
        grid, left_out = load_grid(flags.folders)
        lines, summary = curves(grid, flags.points, flags.lowest), overall(grid)
        comparisons = pd.DataFrame()
        if flags.compare:
            comparisons = compare(grid, *flags.compare, flags.resamples, flags.seed)
    except (KVCompressError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    if flags.json:
        frames = {"cells": grid.drop(columns="questions"), "curves": lines, "overall": summary, "compared": comparisons}
        print(dumps({name: _records(frame) for name, frame in frames.items()}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables(grid, lines, summary, comparisons):
        console.print(table)
    return 0


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for JSON, which has no NaN."""
    missing = frame.astype(object).where(frame.notna(), None)
    return missing.to_dict("records")


if __name__ == "__main__":
    sys.exit(main())
