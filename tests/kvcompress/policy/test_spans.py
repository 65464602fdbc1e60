"""`protect=` names tokens of a prompt; what it cannot name is refused in one line."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.errors import KVCompressError
from kvcompress.policy.spans import Spans

VISION = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 0, 0, 0]]).bool()  # the row begins with a pad


@pytest.mark.parametrize(
    ("setting", "places"),
    [
        ("system", [1, 2]),
        ("question", [7, 8, 9]),
        ("text", [1, 2, 5, 7, 8, 9]),
        ("first:2", [1, 2]),
        ("last:3", [7, 8, 9]),
        ("tokens:1-4", [2, 3, 4]),
        ("prompt", []),
        ("prompt+first:1+last:1", [1, 9]),
    ],
)
def test_a_part_names_these_tokens(setting, places):
    mask = Spans.parse(setting).mask([9], VISION, 10, is_first=True)
    assert mask[0].nonzero()[:, 0].tolist() == places


@given(pads=st.integers(0, 20), length=st.integers(9, 30))
def test_pads_do_not_move_what_a_part_names(pads, length):
    spans = Spans.parse("first:2+last:3+tokens:4-9")
    alone = spans.mask([length], None, length, True)
    padded = spans.mask([length], None, pads + length, True)
    assert torch.equal(padded[:, pads:], alone)
    assert not padded[:, :pads].any()


def test_parts_at_the_beginning_are_of_the_first_prompt_alone():
    spans = Spans.parse("system+first:2+tokens:1-2+last:1")
    assert spans.mask([9], VISION, 10, is_first=False)[0].nonzero()[:, 0].tolist() == [9]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("first:10", "row 0, which has 9 tokens"),
        ("last:10", "which has 9"),
        ("tokens:8-10", r"tokens:8-10.*which has 9"),
    ],
)
def test_a_span_that_is_not_in_the_prompt_is_refused(setting, said):
    with pytest.raises(KVCompressError, match=said):
        Spans.parse(setting).mask([9], VISION, 10, True)


def test_a_row_without_vision_tokens_has_no_system_part():
    with pytest.raises(KVCompressError, match=r"row 0 has no image or video token.*first:N"):
        Spans.parse("system").mask([10], torch.zeros_like(VISION), 10, True)
    with pytest.raises(KVCompressError, match="need input_ids"):
        Spans.parse("text").mask([10], None, 10, True)
