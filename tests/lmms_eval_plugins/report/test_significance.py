"""Tests and intervals: against scipy's and lmms-eval's own, and numbers worked by hand."""

from functools import cache

import numpy as np
import pytest
from lmms_eval.api.metrics import clustered_stderr, paired_ttest, power_analysis
from scipy.stats import binomtest, t, ttest_rel

from kvcompress import KVCompressError
from lmms_eval_plugins.report.significance import (
    holm,
    least_difference,
    mean_interval,
    paired_test,
    power_line,
    questions_needed,
)

RANDOM = np.random.default_rng(0)
A, B = (RANDOM.random((2, 300)) < [[0.8], [0.7]]).astype(float)


def test_without_clusters_it_is_the_paired_t_test():
    found, expected, lmms_evals = paired_test(A, B), ttest_rel(A, B), paired_ttest(list(A), list(B))
    assert (found.questions, found.clusters, found.difference) == (300, 300, pytest.approx(np.mean(A - B)))
    assert found.p_value == pytest.approx(expected.pvalue) == pytest.approx(lmms_evals["p_value"])
    assert [found.low, found.high] == pytest.approx([*expected.confidence_interval()])
    other = paired_test(B, A)
    assert (other.difference, other.low, other.high) == pytest.approx((-found.difference, -found.high, -found.low))


def test_with_clusters_the_standard_error_is_lmms_evals():
    clusters = RANDOM.integers(100, size=300)
    a = np.clip(A + 0.3 * (clusters % 3), 0, 1)
    found = paired_test(a, B, clusters)
    half = t.ppf(0.975, found.clusters - 1) * clustered_stderr(list(a - B), list(clusters))
    assert found.clusters == len(set(clusters))
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.01)  # they differ in 1 / clusters


def test_asking_each_question_three_times_shows_nothing_new():
    once, thrice = paired_test(A, B), paired_test(np.repeat(A, 3), np.repeat(B, 3), np.repeat(np.arange(300), 3))
    assert thrice.questions == 900
    assert [thrice.low, thrice.high] == pytest.approx([once.low, once.high], abs=1e-3)
    assert thrice.p_value == pytest.approx(once.p_value, rel=0.01)
    careless = paired_test(np.repeat(A, 3), np.repeat(B, 3))
    assert careless.high - careless.low < 0.6 * (once.high - once.low)


@pytest.mark.parametrize("lost", [1, 4, 9])
def test_where_few_answers_turned_the_p_value_is_that_of_the_sign_test(lost):
    a = np.ones(100)
    a[:lost] = 0
    found = paired_test(a, np.ones(100))
    assert found.p_value == pytest.approx(binomtest(lost, lost).pvalue)
    assert found.low < -lost / 100 < found.high
    assert (found.high < 0) == (found.p_value < 0.025)


@pytest.mark.parametrize("questions", [9, 10, 11, 32, 500])
def test_where_every_answer_turned_the_interval_has_a_width(questions):
    found = paired_test(np.zeros(questions), np.ones(questions))
    assert found.difference == found.low == -1
    assert found.p_value == pytest.approx(2**-questions * 2)
    assert -1 < found.high < -1 + 16 / questions


def test_equal_answers_to_few_questions_do_not_show_that_methods_are_equal():
    for questions in (10, 100, 1000):
        found = paired_test(np.ones(questions), np.ones(questions))
        assert (found.difference, found.p_value, found.high) == (0, 1, -found.low)
        # Were a share of `high` to turn, none of so many questions would in about 1 case of 20.
        assert 1 / 40 < (1 - found.high) ** questions < 1 / 14


def test_where_few_answers_turned_the_interval_is_bonetts_and_prices():
    turned = np.repeat([-1, 0, 1], [6, 40, 2])  # f12 = 2 and f21 = 6 of 48
    worse, better = (6 + 1) / 50, (2 + 1) / 50
    half = t.ppf(0.975, 49) * np.sqrt((worse + better - (better - worse) ** 2) / 50)
    found = paired_test(1 + np.minimum(turned, 0), 1 - np.maximum(turned, 0))
    assert (found.low, found.high) == pytest.approx((better - worse - half, better - worse + half))


@pytest.mark.parametrize("shares", [(0.04, 0.95, 0.01), (0.05, 0.95, 0), (0.1, 0.8, 0.1)])
def test_the_interval_of_few_holds_the_truth_often_enough(shares):
    @cache
    def is_missed(worse: int, better: int) -> bool:
        turned = np.repeat([-1, 0, 1], [worse, 60 - worse - better, better])
        found = paired_test(1 + np.minimum(turned, 0), 1 - np.maximum(turned, 0))
        return not found.low - 1e-9 <= shares[2] - shares[0] <= found.high + 1e-9

    drawn = np.random.default_rng(1).multinomial(60, shares, size=1000)
    assert sum(is_missed(worse, better) for worse, _, better in drawn.tolist()) <= 0.05 * 1000


def test_small_changes_of_few_scores_have_an_interval_no_wider_than_turned_answers():
    a, parts = np.ones(48), np.ones(48)
    a[:5], parts[:5] = 0, 0.8
    turned, changed = paired_test(a, np.ones(48)), paired_test(parts, np.ones(48))
    assert changed.high - changed.low < turned.high - turned.low


def test_a_large_cluster_that_turned_is_within_the_interval():
    a, clusters = np.ones(100), [0] * 80 + [*range(1, 21)]
    a[:80] = 0
    found = paired_test(a, np.ones(100), clusters)
    assert (found.difference, found.clusters, found.p_value) == (-0.8, 21, 1)
    assert found.low <= -0.8


@pytest.mark.parametrize("values", [[1, 0], [0.2, 0.3]])
def test_clusters_that_all_changed_alike_have_no_standard_error_of_rounding(values):
    a, clusters = np.tile(values, 12), np.repeat(np.arange(12), 2)
    found = paired_test(a, np.zeros(24), clusters)
    assert found.p_value == pytest.approx(2 * 2**-12), "a sign test over 12 clusters"
    assert found.high - found.low > 0.05
    assert mean_interval(a, clusters) is None


def test_scores_of_another_range_have_an_interval_of_that_range():
    found = paired_test(np.full(20, 80.0), np.full(20, 80.0))
    shares = paired_test(np.ones(20), np.ones(20))
    assert found.high == pytest.approx(80 * shares.high)


def test_different_questions_cannot_be_paired():
    with pytest.raises(KVCompressError, match="not 2 and 1"):
        paired_test([1, 1], [1])
    with pytest.raises(KVCompressError, match="not 0 and 0"):
        paired_test([], [])


def test_the_interval_of_a_mean_is_clustered_and_ends_where_scores_do():
    half = t.ppf(0.975, 299) * A.std(ddof=1) / np.sqrt(300)
    assert mean_interval(A) == pytest.approx((A.mean() - half, A.mean() + half))
    low, high = mean_interval(np.repeat(A, 2), np.repeat(np.arange(300), 2))
    assert high - low == pytest.approx(2 * half, rel=0.01)
    assert mean_interval([1, 1, 1, 0])[1] == 1
    assert mean_interval([80, 90, 100, 70])[1] > 100
    assert mean_interval([1, 1, 1]) is mean_interval([1, 0], ["a", "a"]) is None


def test_holm_multiplies_the_smallest_by_the_number_of_tests():
    corrected = holm([0.01, 0.04, np.nan, 0.03, 0.5])
    assert corrected == pytest.approx([0.04, 0.09, np.nan, 0.09, 0.5], nan_ok=True)
    assert np.isnan(holm([np.nan])).all()


def test_power_is_lmms_evals():
    expected = power_analysis(0.02, std_a=0.5, correlation=0.5, current_n=250)
    assert questions_needed(0.02, 0.5) == expected["min_n"]
    assert least_difference(250, 0.5) == pytest.approx(expected["min_detectable_effect"], abs=1e-4)
    assert power_line("t", 250) == (
        "t: 250 questions can detect a difference of 5.6 points (p < 0.05, power 80%, if a tenth of the answers "
        "change); 2 points need 1963"
    )
