"""What a flag may be, at its bounds."""

import argparse

import pytest

from kvcompress.flag_types import whole


@pytest.mark.parametrize("text", ["2147483648", "4294967296", "99999999999"])
def test_a_whole_number_has_31_bits(text):
    assert whole()("2147483647") == 2**31 - 1
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of at least 0"):
        whole()(text)
