"""What stands in a message, and what counts as a number."""

import pytest

from kvcompress.errors import LONGEST_SHOWN, plain_number, shown


def test_a_value_in_a_message_is_cut_to_a_bounded_length():
    assert shown("a" * (LONGEST_SHOWN - 2)) == repr("a" * (LONGEST_SHOWN - 2))
    long = shown("a" * 10_000)
    assert len(long) == LONGEST_SHOWN
    assert long.endswith("...")


@pytest.mark.parametrize("text", ["1,2_", "x1,2", "_1,2", "1_0,2"])
def test_a_list_of_numbers_takes_no_other_characters(text):
    assert plain_number("(1,2)", tuple[int, ...]) == (1, 2)
    with pytest.raises(ValueError, match="Input should be a whole number"):
        plain_number(text, tuple[int, ...])
