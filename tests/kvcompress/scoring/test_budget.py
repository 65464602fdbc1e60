import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress import Budget, KVCompressError
from kvcompress.layer_budgets.base import layer_budget
from kvcompress.policy.options import Engine
from kvcompress.scoring.budget import allocate, pyramid


@given(ratio=st.floats(0, 1, exclude_min=True), length=st.integers(1, 100_000))
def test_a_ratio_keeps_that_share_to_half_an_entry_and_at_least_one(ratio, length):
    kept = Budget(ratio)(length)
    assert 1 <= kept <= length
    assert abs(kept - ratio * length) <= 0.5 or kept == 1


@pytest.mark.parametrize(
    ("ratio", "length", "kept"), [(0.1, 355, 36), (0.5, 5, 3), (0.5, 7, 4), (0.3, 1, 1), (1.0, 9, 9)]
)
def test_halves_round_up(ratio, length, kept):
    assert Budget(ratio)(length) == kept


@given(
    ratio=st.floats(0, 1, exclude_min=True),
    entries=st.integers(1, 100),
    on_top=st.integers(0, 9),
    length=st.integers(1, 99),
)
def test_what_is_kept_on_top_is_no_part_of_a_ratio_but_of_a_number_of_entries(ratio, entries, on_top, length):
    kept = Budget(ratio, on_top=on_top)(length)
    of_rest = math.floor(ratio * max(length - on_top, 0) + 0.5)
    assert kept == max(min(on_top, length) + of_rest, 1)
    assert Budget(entries=entries, on_top=on_top)(length) == Budget(entries=entries)(length)


@given(entries=st.integers(1, 1000), length=st.integers(1, 1000))
def test_a_number_of_entries_is_capped_by_the_prompt(entries, length):
    assert Budget(entries=entries)(length) == min(entries, length)


@pytest.mark.parametrize(
    "arguments", [(None, None), (0.5, 3), (0,), (-1.0,), (1.01,), (True,), (None, True), (None, 0)]
)
def test_anything_else_is_an_error(arguments):
    with pytest.raises(KVCompressError):
        Budget(*arguments)


@given(
    budget=st.integers(1, 2000),
    more=st.integers(0, 5000),
    layers=st.integers(1, 80),
    beta=st.floats(1, 50),
    least=st.integers(1, 64),
)
def test_a_pyramid_sums_exactly_falls_and_never_exceeds_the_prompt(budget, more, layers, beta, least):
    window = min(least, budget)
    of_kvpress = layer_budget("pyramid-kvpress").fixed(budget, budget + more + window, layers, window, beta)
    for budgets in (pyramid(budget, budget + more, layers, beta, window), of_kvpress):
        assert sum(budgets) == budget * layers
        assert all(1 <= n <= budget + more for n in budgets)
        assert all(a >= b - 1 for a, b in pairwise(budgets))  # rounding may shift one entry


def test_a_pyramid_worked_by_hand():
    assert pyramid(100, 10_000, 5, beta=10, least=8) == [190, 145, 100, 55, 10]
    assert pyramid(100, 150, 5, beta=10, least=8) == [150, 125, 100, 75, 50]  # the first layer keeps all it has
    assert pyramid(100, 10_000, 5, beta=20, least=8) == [100] * 5  # the last layer would hold less than the window
    assert pyramid(100, 10_000, 5, beta=20, least=5) == [195, 148, 100, 52, 5]  # it holds just the window
    of_kvpress = layer_budget("pyramid-kvpress")  # 58.5, 44.25, 30, 15.75, 1.5
    assert of_kvpress.fixed(30, 10_000, 5, window=1, beta=20) == [58, 44, 30, 16, 2]


def test_budgets_fall_with_the_papers_beta_down_to_a_single_entry():
    """PyramidKV, section 4: beta is 20. A method with a window of one leaves the last layer that one entry."""
    assert Engine().pyramid_beta == 20
    budgets = layer_budget("pyramid").fixed(20, 10_000, num_layers=5, window=1, beta=20)
    assert sum(budgets) == 100
    assert budgets[0] > budgets[-1]


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    most=st.integers(0, 500),
    share=st.floats(0, 1),
)
def test_an_allocation_sums_exactly_within_its_bounds_and_follows_the_weights(weights, most, share):
    total = round(share * most * len(weights))
    parts = allocate(weights, total, most)
    assert sum(parts) == total
    assert all((1 if total >= len(weights) else 0) <= part <= most for part in parts)
    ranked = sorted(zip(weights, parts, strict=True))
    assert all(a <= b + 1 for (_, a), (_, b) in pairwise(ranked))  # rounding may shift one entry


def test_allocations_worked_by_hand():
    assert allocate([1, 1, 2], 8, most=10) == [2, 2, 4]
    assert allocate([1, 1, 2], 8, most=3) == [3, 2, 3]  # what the third cannot take goes to the others
    assert allocate([3, 2, 2], 10, most=10) == [4, 3, 3]  # 4.29, 2.86, 2.86
    assert allocate([0, 1], 5, most=9) == [1, 4]  # every layer keeps something
    assert allocate([0, 0, 0], 4, most=9) == [2, 1, 1]


@pytest.mark.parametrize("total", [-1, 7])
def test_more_than_there_is_cannot_be_allocated(total):
    with pytest.raises(ValueError, match="cannot be shared out"):
        allocate([1, 1], total, most=3)
