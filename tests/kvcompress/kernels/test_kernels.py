"""Kernels of the prefill equal their plain references, and are taken where they should be."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
@pytest.mark.parametrize("capability", [80, 90])
def test_the_triton_kernels_compile_for_a_gpu(capability):
    """The interpreter lets pass what the compiler refuses, such as a name whose shape changes in a loop."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from kvcompress.kernels import (
        adaptive_triton,
        column_sums_triton,
        grouped_triton,
        likeness_triton,
        ragged_decode_triton,
        ragged_layout_triton,
        turboquant_triton,
    )

    tensors = {
        **dict.fromkeys(("padding", "starts", "lengths", "ends", "appended"), "*i64"),
        "first": "*i64",
        "weights": "*fp32",
        "log_sums": "*fp32",
        "sums": "*fp32",
        **dict.fromkeys(("norms", "means"), "*fp32"),
        **dict.fromkeys(("left_out", "flat_columns"), "*i32"),
        **dict.fromkeys(("order", "totals", "kept"), "*i64") | {"ordered": "*fp32", "is_lost": "*i8"},
        **dict.fromkeys(("flat_keys", "flat_values", "dense_keys", "dense_values"), "*bf16"),
        **dict.fromkeys(("columns", "dense_columns", "counts"), "*i64"),
        **dict.fromkeys(("scaling", "similar"), "fp32"),
        **dict.fromkeys(("key_codebook", "value_codebook", "partial", "maxima"), "*fp32"),
        **dict.fromkeys(("rotation", "key_rotation", "value_rotation", "key_boundaries", "value_boundaries"), "*fp32"),
        **dict.fromkeys(("packed_keys", "packed_values"), "*u8"),
        **dict.fromkeys(("vectors", "rotated", "query", "queries", "keys", "values"), "*bf16"),
        **dict.fromkeys(("new_keys", "new_values", "recent_keys", "recent_values", "scale"), "*bf16"),
        "table": "*i64",
    }
    sizes = {"GROUPS": 2, "STAYING": 32, "MOVING": 16}
    number = {"columns": "i32"}
    packed = dict.fromkeys(("keys", "values"), "*u8")
    wide = {"BLOCK_KEYS": 64, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_KEY_DIM": 128, "BLOCK_VALUE_DIM": 128}
    kernels = [
        (column_sums_triton._sum_rows, number, {}),
        (column_sums_triton._sum_columns, number, {}),
        (likeness_triton._leave_out, number, {"SPARES_FIRST": True, "PADDED": True}),
        (likeness_triton._average, number, {"PADDED": True}),
        (adaptive_triton._drop, number, {"SAFEGUARD": 0.2, "BLENDS": True, "HEADS": 8, "BLOCK": 1024}),
        (adaptive_triton._drop, number, {"SAFEGUARD": 0.2, "BLENDS": False, "HEADS": 8, "BLOCK": 1024}),
        (adaptive_triton._list, number, {"BLOCK": 1024}),
        (ragged_layout_triton._to_segments, {}, {"SEGMENTS": 8, **wide}),
        (ragged_layout_triton._from_segments, {"columns": "*i32", "appended": "i32"}, wide),
        (ragged_decode_triton._attend, {}, {"BITS": 0, "APPENDS": True, "COUNTED": False, **wide}),
        (ragged_decode_triton._attend, {}, {"BITS": 0, "APPENDS": True, "COUNTED": True, **wide}),
        (ragged_decode_triton._attend, packed, {"BITS": 3, "APPENDS": False, "COUNTED": False, **wide}),
        (ragged_decode_triton.combine, {"output": "*bf16"}, wide),
        (grouped_triton._attend_groups, packed, {"BITS": 2, "IS_HQQ": False, **wide, "BLOCK_KEYS": 32}),
        (grouped_triton._attend_groups, packed, {"BITS": 4, "IS_HQQ": True, **wide, "BLOCK_KEYS": 32}),
        (turboquant_triton._combine_back, {"output": "*bf16"}, {"DIM": 80, "BLOCK_DIM": 128}),
        (turboquant_triton._rotate, {}, {"DIM": 80, "BLOCK_DIM": 128}),
        (turboquant_triton._pack, {}, {"BITS": 3, **wide}),
    ]
    for kernel, types, numbers in kernels:
        stages = ragged_decode_triton.PACKED_STAGES if types is packed else ragged_decode_triton.STAGES
        names = kernel.arg_names
        types = {name: "constexpr" if name.isupper() else (tensors | types).get(name, "i32") for name in names}
        fixed = {name: (sizes | numbers).get(name, 16) for name in names if name.isupper()}
        source = triton.compiler.ASTSource(kernel, types, constexprs=fixed)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": stages})
        assert compiled.metadata.shared < 90_000
