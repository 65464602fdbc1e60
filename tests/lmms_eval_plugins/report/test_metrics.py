"""Metrics: each against numbers worked by hand."""

import math

import numpy as np
import pytest
from lmms_eval.models.model_utils.efficiency_metrics import build_efficiency_summary

from kvcompress import KVCompressError
from lmms_eval_plugins.report import metrics


def test_overall_performance_is_the_root_mean_square_of_the_shares():
    relative = metrics.relative_scores([30, 40], [50, 50])  # 0.6 and 0.8
    assert relative.tolist() == [0.6, 0.8]
    assert metrics.overall_performance(relative) == pytest.approx(math.sqrt((0.36 + 0.64) / 2))


def test_overall_performance_rewards_variance_and_generalisation_says_so():
    even, uneven = [0.5, 0.5], [0.0, 1.0]  # the same mean
    assert metrics.overall_performance(uneven) > metrics.overall_performance(even)
    assert metrics.overall_generalisation(even) == 0
    assert metrics.overall_generalisation(uneven) == pytest.approx(0.5 / 0.5)
    assert metrics.overall_generalisation([0.6, 0.8]) == pytest.approx(0.1 / 0.7)


def test_a_full_cache_that_scores_nothing_is_an_error():
    with pytest.raises(KVCompressError, match="the full cache scores 0"):
        metrics.relative_scores([1.0], [0.0])
    with pytest.raises(KVCompressError, match="all scores are 0"):
        metrics.overall_generalisation([0.0, 0.0])


def test_loyalty_counts_the_full_caches_answers_right_or_wrong():
    assert metrics.loyalty(["7", "cat", "no", ""], ["7", "dog", "no", ""]) == 0.75
    with pytest.raises(KVCompressError, match="not 1 with 2"):
        metrics.loyalty(["7"], ["7", "8"])


def test_speed_up_is_of_the_total_time():
    assert metrics.speed_up([1.0, 1.0], [1.0, 3.0]) == 2.0


def test_area_is_the_mean_over_a_logarithmic_axis():
    # 1/4, 1/2, 1 are evenly spaced: trapezoids of 0.5 to 0.9 and 0.9 to 1, of the same width.
    assert metrics.area_under_curve([0.5, 0.25], [0.9, 0.5], 0.25) == pytest.approx((0.7 + 0.95) / 2)
    assert metrics.area_under_curve([0.25, 0.5], [1, 1], 0.25) == pytest.approx(1)


def test_area_from_a_ratio_between_two_measured_ones_is_interpolated():
    # At 1/2, half-way between 1/4 and 1 on this axis, the line from 0.5 to 1 is at 0.75.
    assert metrics.area_under_curve([0.25], [0.5], 0.5) == pytest.approx((0.75 + 1) / 2)
    assert metrics.area_under_curve([0.1, 0.25, 1.0], [0, 0.5, 0.9], 0.25) == pytest.approx(0.7)  # full measured too


def test_area_below_the_smallest_measured_ratio_is_an_error():
    with pytest.raises(KVCompressError, match=r"from ratio 0.1 needs a score there; the smallest ratio is 0.25"):
        metrics.area_under_curve([0.25], [0.5], 0.1)
    with pytest.raises(KVCompressError, match="starts at a ratio"):
        metrics.area_under_curve([0.25], [0.5], 1.0)


def test_smallest_ratio_is_a_measured_one_above_which_all_are_good_enough():
    ratios, scores = [0.5, 0.2, 0.1, 0.05], [79.5, 79.0, 70.0, 79.9]
    assert metrics.smallest_ratio(ratios, scores, full=80, points=1) == 0.2  # 0.05 is luck: 0.1 is worse
    assert metrics.smallest_ratio(ratios, scores, full=80, points=0.5) == 0.5
    assert metrics.smallest_ratio(ratios, scores, full=80, points=0.1) == 1
    assert metrics.smallest_ratio(ratios, scores, full=80, points=20) == 0.05


def test_tokens_per_correct_answer_are_lmms_evals():
    tokens, scores = [3, 5, 4, 8], [1.0, 0.0, 0.5, -1.0]
    samples = [
        {"exact_match": score, "token_counts": [{"output_tokens": count}]}
        for count, score in zip(tokens, scores, strict=True)
    ]
    expected = build_efficiency_summary({"samples": {"task": samples}})["overall"]["tokens_per_correct_answer"]
    assert metrics.tokens_per_correct(tokens, scores) == expected == 20 / 1.5
    assert metrics.tokens_per_correct([3], [0.0]) is None


def test_the_front_of_speed_and_score_and_the_fastest_cell_at_equal_accuracy():
    speeds, scores = [10, 30, 9, 31, 30], [90, 80, 85, 10, 79]
    assert metrics.on_front(speeds, scores) == [True, True, False, True, False]
    assert metrics.on_front([1, 1], [5, 5]) == [True, True]
    assert metrics.fastest(speeds, scores, full=90, points=10) == 30
    assert metrics.fastest(speeds, scores, full=90, points=9.9) == 10
    assert metrics.fastest([], [], full=90, points=1) is None


def test_a_gain_of_less_than_three_percent_brings_no_cell_to_the_front():
    """The lower score of two is not on the front for the noise of its timing, the higher one is, though slower."""
    assert metrics.on_front([19.1, 19.5], [98, 5]) == [True, False]
    assert metrics.on_front([19.5, 19.1], [98, 5]) == [True, False]
    assert metrics.on_front([19.1, 19.8], [98, 5]) == [True, True]
    assert metrics.on_front([19.1, 19.5, 19.8], [98, 98, 98]) == [False, True, True]
    # Each is within 3 % of the one before; the third is more than that above the first, which is on the front.
    assert metrics.on_front([20, 20.5, 21, 21.5], [90, 60, 40, 20]) == [True, False, True, False]
    assert metrics.on_front([], []) == []


def test_headroom_is_the_part_of_the_way_from_random_to_hindsight():
    random, hindsight = [0, 0, 1, 0], [1, 1, 1, 1]
    assert metrics.headroom([1, 0, 1, 0], random, hindsight).part == pytest.approx(1 / 3)
    assert metrics.headroom(random, random, hindsight) == metrics.Headroom(0, 0, 0)
    assert metrics.headroom(hindsight, random, hindsight) == metrics.Headroom(1, 1, 1)
    assert metrics.headroom([0, 0, 0, 0], random, hindsight).part == pytest.approx(-1 / 3)
    assert metrics.headroom([1, 1, 1, 1], hindsight, random) is None
    assert metrics.headroom(random, random, random) is None
    with pytest.raises(KVCompressError, match="same questions, not 3, 4 and 4"):
        metrics.headroom([1, 1, 1], random, hindsight)


def test_the_interval_of_headroom_draws_the_questions_of_all_three_together():
    """Every draw of these has the same part, whatever questions it has; apart they would scatter."""
    hindsight = np.array([0.2, 1.0, 0.6, 0.4, 0.8] * 4)
    found = metrics.headroom(hindsight / 2, np.zeros(20), hindsight)
    assert [found.part, found.low, found.high] == pytest.approx([0.5] * 3)
    right = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 0] * 10)
    wide = metrics.headroom(right, np.zeros(100), np.ones(100))
    assert (wide.part, wide.low, wide.high) == pytest.approx((0.5, 0.4, 0.6), abs=0.01)


def test_the_interval_of_headroom_draws_whole_clusters():
    """Ten clusters that are alike: whatever is drawn, the part is the same. Ten that are not: it scatters."""
    right = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 0] * 10)
    alike = metrics.headroom(right, np.zeros(100), np.ones(100), [n // 10 for n in range(100)])
    assert (alike.part, alike.low, alike.high) == (0.5, 0.5, 0.5)
    apart = metrics.headroom(np.sort(right), np.zeros(100), np.ones(100), [n // 10 for n in range(100)])
    assert apart.high - apart.low > 0.5
