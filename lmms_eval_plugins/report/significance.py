"""Tests and intervals for scores of the same questions, by statsmodels and scipy.

Questions about one picture or document are not independent: they form a cluster, and standard errors are clustered
(Miller 2024, https://arxiv.org/abs/2411.00640). Without clusters, every question is one of its own.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import binomtest, permutation_test
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import normal_sample_size_one_tail

from kvcompress import KVCompressError

from .metrics import Numbers

ALPHA, POWER = 0.05, 0.8  # the usual error rates: of finding what is not there, and 1 - that of missing what is
FEW = 10  # clusters that changed; with so few, a sum is not nearly normal


@dataclass(frozen=True)
class Comparison:
    """Mean score of A minus that of B on the same questions, with 95 % interval and two-sided p-value. `deviation` is
    the standard deviation of a question's difference that explains the interval's width."""

    questions: int
    clusters: int
    difference: float
    low: float
    high: float
    p_value: float
    deviation: float


def paired_test(a: Numbers, b: Numbers, clusters: Sequence | None = None) -> Comparison:
    """Compare two methods on the same questions.

    Interval and p-value are those of a t-test on the differences with clustered standard errors; with a cluster per
    question, the paired t-test. Where at most FEW clusters changed, the p-value is exact, over all flips of their
    signs, and the interval is `_of_few`, which has a width even if nothing changed. So it is where all changed alike.

    Args:
        a, b: scores of the questions, in the same order, (questions,).
        clusters: what each question belongs to, (questions,).

    Raises:
        KVCompressError: different numbers of questions, or none.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    if len(a) != len(b) or not len(a):
        raise KVCompressError(f"a paired comparison needs the same questions, not {len(a)} and {len(b)}")
    codes, scores = _codes(clusters, len(a)), np.concatenate([a, b])
    most = max(1.0, float(np.ptp(scores)), float(np.abs(scores).max()))  # by which a question's score can differ
    of_cluster = pd.Series(a - b).groupby(codes).agg(["sum", "size"])
    changed = of_cluster["sum"][of_cluster["sum"].abs() > 1e-12].to_numpy()
    if len(changed) > FEW and np.ptp(a - b) > 1e-12:
        low, high, p_value = _clustered(a - b, codes)
    else:  # also where every question changed alike, which has no standard error
        largest = most * len(of_cluster) * of_cluster["size"].max() / len(a)
        are_shares = len(of_cluster) == len(a) and set(scores) <= {0.0, 1.0}
        low, high = _of_few(changed, len(of_cluster), largest, are_shares)
        p_value = 1.0
        if len(changed) > FEW:
            p_value = binomtest(int((changed > 0).sum()), len(changed)).pvalue
        elif len(changed) > 1:
            p_value = permutation_test((changed,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    deviation = (high - low) / 2 / 1.96 * math.sqrt(len(a))
    ends = max(low, -most), min(high, most)
    return Comparison(len(a), len(of_cluster), float(np.mean(a - b)), *ends, float(p_value), deviation)


def _of_few(changed: np.ndarray, clusters: int, largest: float, are_shares: bool) -> tuple[float, float]:
    """Return the ends of the interval of a mean difference of which few clusters have a part. It joins two shares, each
    in its Clopper-Pearson interval of 97.5 %, so that both hold in 95 %.

    Args:
        changed: the sums of differences that are not 0.
        largest: by how much the mean can differ if all clusters change.
        are_shares: whether each change counts 1. Then the two are the share of clusters that change and of those the
            share that gets better; else those that get worse and better, each by as much as can be, or nearly nothing.
    """
    worse, better = int((changed < 0).sum()), int((changed > 0).sum())

    def share(part: int, whole: int) -> tuple[float, float]:
        return tuple(binomtest(part, whole).proportion_ci(1 - ALPHA / 2)) if whole else (0.0, 1.0)

    if are_shares:
        ends = itertools.product(share(len(changed), clusters), share(better, len(changed)))
        possible = [moved * (2 * up - 1) for moved, up in ends]
        return min(possible), max(possible)
    return -largest * share(worse, clusters)[1], largest * share(better, clusters)[1]


def mean_interval(scores: Numbers, clusters: Sequence | None = None) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean score, with clustered standard errors, within [0, 1] if all scores are. None
    if there is a single cluster, or all scores are equal."""
    scores, codes = np.asarray(scores, float), _codes(clusters, len(scores))
    if len(set(codes)) < 2 or not np.ptp(scores):
        return None
    low, high, _ = _clustered(scores, codes)
    is_share = scores.min() >= 0 and scores.max() <= 1
    return (max(low, 0.0), min(high, 1.0)) if is_share else (low, high)


def _codes(clusters: Sequence | None, questions: int) -> np.ndarray:
    return np.arange(questions) if clusters is None else pd.factorize(np.asarray(clusters, object))[0]


def _clustered(values: np.ndarray, codes: np.ndarray) -> tuple[float, float, float]:
    """Return the ends of the mean's interval, and the p-value of a mean of 0."""
    fit = OLS(values, np.ones(len(values))).fit(cov_type="cluster", cov_kwds={"groups": codes}, use_t=True)
    low, high = fit.conf_int(ALPHA)[0]
    return float(low), float(high), float(fit.pvalues[0])


def holm(p_values: Numbers) -> np.ndarray:
    """Return p-values corrected for their number by Holm's method; NaN stays NaN and does not count."""
    corrected = np.array(p_values, float)
    known = ~np.isnan(corrected)
    if known.any():
        corrected[known] = multipletests(corrected[known], method="holm")[1]
    return corrected


# -- how many questions


def questions_needed(difference: float, deviation: float) -> int:
    """Return how many questions show a mean difference with p < 0.05 in 80 % of all cases.

    Args:
        difference: to be shown, above 0.
        deviation: standard deviation of a question's difference, in the same unit.
    """
    return math.ceil(normal_sample_size_one_tail(difference, POWER, ALPHA / 2, deviation) - 1e-9)


def least_difference(questions: int, deviation: float) -> float:
    """Return the smallest difference that this many questions show, as in `questions_needed`."""
    return math.sqrt(normal_sample_size_one_tail(1.0, POWER, ALPHA / 2, deviation) / questions)


CHANGED = 0.1  # share of answers that turn from right to wrong or back: not known before a run


def power_line(task: str, questions: int, points: float = 2.0) -> str:
    """Say before a run what a paired test on this many questions will find, and what `points` need."""
    deviation = 100 * math.sqrt(CHANGED)
    return (
        f"{task}: {questions} questions can detect a difference of {least_difference(questions, deviation):.1f} points "
        f"(p < {ALPHA:g}, power {POWER:.0%}, if a tenth of the answers change); {points:g} points need "
        f"{questions_needed(points, deviation)}"
    )
