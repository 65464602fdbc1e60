"""Tests and intervals for scores of the same questions, by statsmodels and scipy.

Questions about one picture or document are not independent: they form a cluster, and standard errors are clustered
(Miller 2024, https://arxiv.org/abs/2411.00640). Without clusters, every question is one of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import binomtest, permutation_test, t
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
    question, the paired t-test. Where at most FEW clusters changed, or all alike, the p-value is exact, over all flips
    of their signs, and the interval is `_adjusted`, which has a width even if nothing changed.

    Args:
        a, b: scores of the questions, in the same order, (questions,).
        clusters: what each question belongs to, (questions,).

    Raises:
        KVCompressError: different numbers of questions, or none.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    if len(a) != len(b) or not len(a):
        raise KVCompressError(f"a paired comparison needs the same questions, not {len(a)} and {len(b)}")
    codes, scores = cluster_codes(clusters, len(a)), np.concatenate([a, b])
    most = max(1.0, float(np.ptp(scores)), float(np.abs(scores).max()))  # by which a question's score can differ
    sums, sizes = _of_clusters(a - b, codes)
    changed = sums[np.abs(sums) > 1e-12]
    if len(changed) > FEW and _varies(sums, sizes):
        low, high, p_value = _clustered(a - b, codes)
    else:  # also where every cluster changed alike, which has no standard error
        low, high = _adjusted(sums, sizes, most)
        p_value = 1.0
        if len(changed) > FEW:
            p_value = binomtest(int((changed > 0).sum()), len(changed)).pvalue
        elif len(changed) > 1:
            p_value = permutation_test((changed,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    deviation = (high - low) / 2 / 1.96 * math.sqrt(len(a))
    ends = max(low, -most), min(high, most)
    return Comparison(len(a), len(sums), float(np.mean(a - b)), *ends, float(p_value), deviation)


def _adjusted(sums: np.ndarray, sizes: np.ndarray, most: float) -> tuple[float, float]:
    """Return the ends of the interval of a mean difference, as if two more clusters of mean size had changed, one each
    way, by as much as can be (Bonett and Price 2012, https://doi.org/10.3102/1076998611411915).

    Args:
        sums: sum of a cluster's differences, (clusters,).
        sizes: questions of a cluster, (clusters,).
        most: by which a question's score can differ.
    """
    further = np.full(2, sizes.mean())
    sums, sizes = np.append(sums, further * [most, -most]), np.append(sizes, further)
    mean = sums.sum() / sizes.sum()
    half = t.ppf(1 - ALPHA / 2, len(sums) - 1) * math.sqrt(((sums - mean * sizes) ** 2).sum()) / sizes.sum()
    return float(mean - half), float(mean + half)


def mean_interval(scores: Numbers, clusters: Sequence | None = None) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean score, with clustered standard errors, within [0, 1] if all scores are. None
    if there is a single cluster, or all have the same mean."""
    scores, codes = np.asarray(scores, float), cluster_codes(clusters, len(scores))
    if len(set(codes)) < 2 or not _varies(*_of_clusters(scores, codes)):
        return None
    low, high, _ = _clustered(scores, codes)
    is_share = scores.min() >= 0 and scores.max() <= 1
    return (max(low, 0.0), min(high, 1.0)) if is_share else (low, high)


def cluster_codes(clusters: Sequence | None, questions: int) -> np.ndarray:
    """Number the questions' clusters: (questions,), from 0. Without `clusters`, each question is its own."""
    return np.arange(questions) if clusters is None else pd.factorize(np.asarray(clusters, object))[0]


def _of_clusters(values: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of each cluster's values, (clusters,)."""
    return tuple(pd.Series(values).groupby(codes).agg(["sum", "size"]).to_numpy(float).T)


def _varies(sums: np.ndarray, sizes: np.ndarray) -> bool:
    """Return whether the clusters' means differ; if not, their standard error is 0 up to rounding."""
    return bool(np.ptp(sums / sizes) > 1e-9)


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


def power_line(task: str, questions: int) -> str:
    """Say before a run what a paired test on this many questions will find, and what two points need."""
    points, deviation = 2.0, 100 * math.sqrt(CHANGED)
    return (
        f"{task}: {questions} questions can detect a difference of {least_difference(questions, deviation):.1f} points "
        f"(p < {ALPHA:g}, power {POWER:.0%}, if a tenth of the answers change); {points:g} points need "
        f"{questions_needed(points, deviation)}"
    )
