"""The Triton kernels on a CUDA device equal their plain references, as do the benchmarked ways."""

import pytest
import torch

from benchmarks.ragged_decode import ragged_case as benchmark_case
from benchmarks.ragged_decode import ways_to_attend
from kvcompress.kernels.column_sums import column_sums, column_sums_reference
from kvcompress.kernels.ragged_decode import ragged_decode, ragged_decode_reference
from kvcompress.kernels.static_decode import static_decode
from tests.gpu.cases import DTYPES
from tests.support.grouped_cases import check_grouped_triton
from tests.support.kernel_cases import SHAPES, check_adaptive, check_column_sums, check_likeness, prompt_case
from tests.support.ragged_cases import (
    TOLERANCE,
    check_few_channels_triton,
    check_fp8_pack_triton,
    check_fp8_triton,
    check_layout_triton,
    check_static,
    check_static_triton,
    check_triton,
    check_turboquant_pack_triton,
    check_turboquant_triton,
    ragged_case,
    static_case,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_sums_columns_as_the_reference(cuda, dtype):
    pytest.importorskip("triton")
    check_column_sums(dtype, SHAPES, "cuda")


def test_triton_chooses_over_heads_as_the_reference(cuda):
    pytest.importorskip("triton")
    check_adaptive("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_compares_keys_as_the_reference(cuda, dtype):
    pytest.importorskip("triton")
    check_likeness(dtype, SHAPES, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_summed_as_by_the_reference(device, dtype):
    case = prompt_case(2, 2, 4, 128, 700 if device.type == "cpu" else 3000, [[200], [0]], None, dtype, device=device)
    torch.testing.assert_close(column_sums(*case), column_sums_reference(*case), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_decodes_ragged_entries_as_the_reference(cuda, dtype):
    pytest.importorskip("triton")
    check_triton(dtype, "cuda")
    check_few_channels_triton(dtype, "cuda")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_triton_lays_entries_out_as_pytorch_does(cuda, dtype):
    pytest.importorskip("triton")
    check_layout_triton(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "check", [check_turboquant_triton, check_turboquant_pack_triton, check_fp8_triton, check_fp8_pack_triton]
)
def test_triton_packs_tokens_and_decodes_packed_entries_as_the_reference(cuda, check, dtype):
    pytest.importorskip("triton")
    check(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_decodes_entries_in_groups_as_the_reference(cuda, dtype):
    pytest.importorskip("triton")
    check_grouped_triton(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_writes_and_attends_in_fixed_shapes_as_the_reference(cuda, dtype):
    pytest.importorskip("triton")
    check_static_triton(dtype, "cuda", 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_of_fixed_shapes_is_the_reference(device, dtype):
    for seed in range(3):
        check_static(static_decode, static_case(2, 2, 3, 64, 200, dtype, seed, device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_decoding_takes_as_many_splits_as_the_device_wants(device, dtype):
    """Long segments and few of them, short ones and many: what `ragged_decode` itself chooses."""
    for batch, kv_heads, most in ((1, 1, 9000), (2, 3, 700), (64, 8, 40)):
        *case, sizes = ragged_case(batch, kv_heads, 3, 64, most, 5, dtype, device=device)
        expected = ragged_decode_reference(*case, 0.125)
        output = ragged_decode(*case, max(sizes[::2]), lambda sizes=sizes: sizes, 0.125)
        torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_benchmarked_ways_of_ragged_decoding_are_right(device, dtype):
    case = benchmark_case(4, 6, 2, 64, 300, device=device, dtype=dtype)
    arguments = [case[name] for name in ("query", "keys", "values", "starts", "lengths")]
    expected = ragged_decode_reference(*arguments, 0.125)
    for name, attend in ways_to_attend(case).items():
        if name != "uniform":
            torch.testing.assert_close(attend(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=name)
