"""One token over segments at fixed addresses: the operator is correct, and can be trusted by PyTorch's compiler."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.kernels.static_decode import static_decode
from tests.support.examples import examples
from tests.support.ragged_cases import TOLERANCE, check_static, static_case


@examples(40)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 4),
    groups=st.integers(1, 9),
    head_dim=st.sampled_from([16, 64, 80, 256]),
    capacity=st.sampled_from([1, 2, 50, 200]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_the_operator_on_a_cpu_equals_the_reference(batch, kv_heads, groups, head_dim, capacity, dtype, seed):
    # Without NaN entries: for short segments, a copy reads rows that are not in use.
    case = static_case(batch, kv_heads, groups, head_dim, capacity, dtype, seed)
    check_static(static_decode, [*case[:3], *(part.nan_to_num() for part in case[3:5]), *case[5:]])


def test_the_operator_is_as_it_says_to_the_compiler():
    case = [part.nan_to_num() for part in static_case(2, 2, 3, 16, 20, torch.float32)]
    torch.library.opcheck(static_decode, (*case, 20, 0.25))
    torch.library.opcheck(static_decode, (case[0], None, None, *case[3:], 20, 0.25))
