import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress import Budget, KVCompressError


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


@given(entries=st.integers(1, 1000), length=st.integers(1, 1000))
def test_a_number_of_entries_is_capped_by_the_prompt(entries, length):
    assert Budget(entries=entries)(length) == min(entries, length)


@pytest.mark.parametrize(
    "arguments", [(None, None), (0.5, 3), (0,), (-1.0,), (1.01,), (True,), (None, True), (None, 0)]
)
def test_anything_else_is_an_error(arguments):
    with pytest.raises(KVCompressError):
        Budget(*arguments)
