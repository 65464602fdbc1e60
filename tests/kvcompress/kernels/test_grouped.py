"""Entries in groups on a CPU: the compiled kernel equals attention over the numbers that the codes stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.kernels import grouped_cpu
from kvcompress.kernels.grouped import grouped_decode
from kvcompress.kernels.quantization import Quantizer
from tests.support.examples import examples
from tests.support.grouped_cases import CODINGS, grouped_case
from tests.support.ragged_cases import TOLERANCE

DIMS = st.sampled_from([2, 16, 33, 64, 80, 128])


@pytest.fixture(autouse=True)
def kernels():
    if grouped_cpu.kernels() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@examples(60)
@given(
    coding=st.sampled_from(CODINGS),
    group_size=st.sampled_from([8, 16, 64, 100]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    dims=st.tuples(DIMS, DIMS),
    most=st.lists(st.sampled_from([1, 5, 128, 300, 700]), min_size=1, max_size=3),
    recent=st.sampled_from([0, 1, 40, 300]),
    dtype=st.sampled_from(list(TOLERANCE)),
    count=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_attention_over_groups_is_that_over_their_numbers(
    threads, coding, group_size, heads, dims, most, recent, dtype, count, seed
):
    threads(count)
    quantizer = Quantizer(*coding, group_size)
    case, expected, _blocks = grouped_case(quantizer, *heads, *dims, most, recent, dtype, seed)
    output = grouped_decode(*case, 0.2)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
