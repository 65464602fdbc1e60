"""Kernels of the prefill equal their plain references, and are taken where they should be."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import offline
from kvcompress.kernels.column_sums import column_sums, column_sums_blocked, column_sums_reference
from kvcompress.kernels.compact import compact, compact_reference
from tests.support.examples import examples
from tests.support.kernel_cases import TOLERANCE, kept_case, prompt_case

COUNTING = [None, "window", "scattered", "weighted", "nobody"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    padded=st.booleans(),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    head_dim=st.sampled_from([16, 33]),
    counting=st.sampled_from(COUNTING),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 7, 16, 128]),
    seed=st.integers(0, 1000),
)
def test_column_sums_of_blocks_equal_those_of_the_whole_attention(
    lengths, padded, kv_heads, groups, head_dim, counting, dtype, block, seed
):
    pads = [[max(lengths) - length] for length in lengths] if padded else None
    case = prompt_case(len(lengths), kv_heads, groups, head_dim, max(lengths), pads, counting, dtype, seed)
    expected = column_sums_reference(*case)
    close = {"atol": TOLERANCE, "rtol": TOLERANCE}
    torch.testing.assert_close(column_sums_blocked(*case, block=block), expected, **close)
    torch.testing.assert_close(column_sums(*case), expected, **close)


def test_every_query_that_counts_gives_one_and_pads_receive_nothing():
    queries, keys, scaling, padding, weights = prompt_case(2, 2, 3, 16, 130, [[0], [50]], "scattered")
    sums = column_sums(queries, keys, scaling, padding, weights)
    real = torch.arange(130) >= padding
    expected = (weights & real).sum(1)[:, None].expand(2, 2).float()
    torch.testing.assert_close(sums.sum(-1), expected)
    assert (sums[1, :, :50] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_rows_are_those_at_their_indices_without_a_graph(dtype):
    keys, values, indices = kept_case(2, 3, 33, 16, 50, 20, dtype)
    keys.requires_grad_()
    moved, expected = compact(keys, values, indices), compact_reference(keys, values, indices)
    for ours, theirs in zip(moved, expected, strict=True):
        assert ours.is_contiguous()
        assert not ours.requires_grad
        assert torch.equal(ours[indices >= 0], theirs[indices >= 0])


@pytest.mark.slow
def test_the_triton_kernels_equal_the_references_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.support.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", offline.HEAD_DIMS)
@pytest.mark.parametrize("architecture", offline.ARCHITECTURES)
def test_the_triton_kernels_compile_for_a_gpu_and_spill_no_register(architecture, head_dim):
    """The interpreter lets pass what the compiler refuses, such as a name whose shape changes in a loop."""
    pytest.importorskip("triton")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for kernel in offline.kernels(head_dim, dtype):
            found = offline.compiled(kernel, architecture)
            assert found.shared < 160 * 1024, found
            assert found.stack == 0, found
