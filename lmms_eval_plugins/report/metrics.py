"""Metrics as plain arithmetic on lists of numbers; `docs/metrics.md` defines them.

OP, OG, OL and OE are EffiVLM-Bench's (https://arxiv.org/abs/2506.00479), as transcribed by secondary sources; we did
not have the paper's own formulas.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvcompress import KVCompressError

Numbers = Sequence[float] | np.ndarray | pd.Series


# -- over benchmarks


def relative_scores(scores: Numbers, full: Numbers) -> np.ndarray:
    """Return score / full cache's score per benchmark. Raises KVCompressError if a full score is not above 0."""
    scores, full = np.asarray(scores, float), np.asarray(full, float)
    if (full <= 0).any():
        raise KVCompressError(f"the full cache scores {full.min():g}: a share of that is meaningless")
    return scores / full


def overall_performance(relative: Numbers) -> float:
    """OP: root mean square over benchmarks of score / full score. It rewards variance: read mean and minimum too."""
    return float(np.sqrt(np.mean(np.square(np.asarray(relative, float)))))


def overall_generalisation(relative: Numbers) -> float:
    """OG: standard deviation over mean of score / full score, over benchmarks. Lower is better.

    The deviation is the population's (divided by the number of benchmarks), so it is 0 for a single one. Raises
    KVCompressError if all scores are 0.
    """
    relative = np.asarray(relative, float)
    if relative.mean() == 0:
        raise KVCompressError("OG is undefined: all scores are 0")
    return float(relative.std() / relative.mean())


# -- over the questions of one benchmark


def loyalty(answers: Sequence[Any], full: Sequence[Any]) -> float:
    """OL: share of questions answered as with the full cache, right or wrong; both lists in the same order."""
    if len(answers) != len(full) or not len(full):
        raise KVCompressError(f"loyalty compares the same questions, not {len(answers)} with {len(full)}")
    return sum(answer == other for answer, other in zip(answers, full, strict=True)) / len(full)


def speed_up(seconds: Numbers, full: Numbers) -> float:
    """OE: seconds with the full cache over the seconds with the compressed cache, for all answers that were timed (not
    NaN) with both; NaN if none was."""
    timed = ~(np.isnan(seconds) | np.isnan(full))
    return float(np.sum(np.asarray(full)[timed]) / np.sum(np.asarray(seconds)[timed])) if timed.any() else math.nan


def tokens_per_correct(tokens: Numbers, scores: Numbers) -> float | None:
    """Return the tokens of all answers over the sum of the positive scores; None if no answer is correct.

    This is lmms-eval's `tokens_per_correct_answer`: with scores of 0 and 1, the cost of a correct answer, including the
    tokens of wrong ones.
    """
    correct = float(np.maximum(np.asarray(scores, float), 0).sum())
    return float(np.sum(tokens)) / correct if correct else None


@dataclass(frozen=True)
class Headroom:
    """How far a method gets from `random` to `hindsight`, with 95 % interval: 0 is as good as random, 1 as good as
    knowing the answer."""

    part: float
    low: float
    high: float


def headroom(scores: Numbers, random: Numbers, hindsight: Numbers, clusters: Sequence | None = None) -> Headroom | None:
    """Return (mean of scores - mean of random) / (mean of hindsight - mean of random) for the same questions at one
    ratio. None if hindsight is not above random.

    The interval spans percentiles 2.5 to 97.5 over clusters resampled with replacement, the three scores together.
    Resamples where hindsight is not above random are left out.

    Args:
        clusters: what each question belongs to, (questions,); default: each is one of its own.

    Raises:
        KVCompressError: different numbers of questions.
    """
    if not len(scores) == len(random) == len(hindsight):
        raise KVCompressError(
            f"headroom compares the same questions, not {len(scores)}, {len(random)} and {len(hindsight)}"
        )
    three = pd.DataFrame(np.stack([scores, random, hindsight], 1).astype(float))
    of_cluster = three if clusters is None else three.groupby(np.asarray(clusters)).sum()
    own, lowest, highest = of_cluster.to_numpy().T

    def part(gained: np.ndarray, way: np.ndarray, axis: int) -> np.ndarray:
        gained, way = gained.sum(axis), way.sum(axis)
        return gained / np.where(way > 1e-12, way, np.nan)

    pair = own - lowest, highest - lowest
    observed = float(part(*pair, axis=0))
    if math.isnan(observed):
        return None
    if len(of_cluster) == 1:
        return Headroom(observed, observed, observed)
    from scipy.stats import DegenerateDataWarning, bootstrap  # takes a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # draws without a way to go are left out below
        drawn = bootstrap(
            pair, part, n_resamples=10_000, paired=True, vectorized=True, method="percentile", rng=0,
            batch=max(1, 1_000_000 // len(of_cluster)),
        )  # fmt: skip
    low, high = np.nanpercentile(drawn.bootstrap_distribution, [2.5, 97.5])
    return Headroom(observed, float(low), float(high))


# -- over the ratios of one method


def area_under_curve(ratios: Numbers, relative: Numbers, lowest: float) -> float:
    """Return the mean of score / full score between the ratio `lowest` and 1, on a logarithmic axis of the ratio.

    On this axis, every halving of the ratio counts the same. The curve joins the measured points with straight lines
    and ends at the full cache, (1, 1). An area of 1 means: as good as the full cache everywhere.

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


SAME = 0.03  # gains within 3 % count as equal; how much timing varies between runs of a cell is not measured


def on_front(gains: Numbers, scores: Numbers) -> list[bool]:
    """Return whether each cell is on the Pareto front of score and gain.

    From the highest score down, a cell is on the front if its gain exceeds that of every cell on the front with a
    higher score by more than 3 %, so that timing noise puts no cell there. Of cells with the same score, the one with
    the largest gain is on it, and those within 3 % of it.

    Args:
        gains: above 0, more is better: answers per second; one over seconds, bytes, or the share kept.
        scores: one per gain, more is better.
    """
    gains, scores = list(gains), list(scores)
    front: list[int] = []
    for cell in sorted(range(len(gains)), key=lambda cell: (-scores[cell], -gains[cell])):

        def is_beaten_by(other: int, cell: int = cell) -> bool:
            if scores[other] > scores[cell]:
                return gains[other] >= gains[cell] * (1 - SAME)
            return gains[other] * (1 - SAME) > gains[cell]

        if not any(map(is_beaten_by, front)):
            front.append(cell)
    return [cell in front for cell in range(len(gains))]


def fastest(speeds: Numbers, scores: Numbers, full: float, points: float) -> float | None:
    """Return the highest speed of a cell that loses at most `points` of the full cache's score; None if none does."""
    found = [speed for speed, score in zip(speeds, scores, strict=True) if score >= full - points - 1e-9]
    return max(found, default=None)


def smallest_ratio(ratios: Numbers, scores: Numbers, full: float, points: float) -> float:
    """Return the smallest measured ratio at which it and all larger ones lose at most `points` of the score.

    Nothing is interpolated. If no measured ratio qualifies, it is 1, the full cache.
    """
    best = 1.0
    for ratio, score in sorted(zip(ratios, scores, strict=True), reverse=True):
        if score < full - points - 1e-9:
            break
        best = min(best, float(ratio))
    return best
