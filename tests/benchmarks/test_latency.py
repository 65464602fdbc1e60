"""The arithmetic of the latency benchmark."""

import pytest

from benchmarks import latency
from kvcompress import KVCompressError


def test_a_row_has_first_tokens_pauses_and_all_tokens_until_the_last():
    row = latency.record("full", 2, {0: [1.0, 2.0, 5.0], 1: [3.0, 4.0, 4.5, 10.0], 2: [2.0, 3.0]})
    assert (row["first"], row["median_first"]) == (1.0, 2.0)
    assert (row["longest_pause"], row["median_longest_pause"]) == (5.5, 3.0)
    assert row["tokens_per_s"] == 0.9


def test_answers_of_one_token_have_no_pause_and_are_refused():
    with pytest.raises(KVCompressError, match="argument --answers: '1' is not a whole number of at least 2"):
        latency.main(["--answers", "1", "4"])
