"""The Triton kernel that writes tokens as 8-bit floats, keys and values in one launch; ragged_decode_triton.py attends
to them. Import it only where triton is installed.
"""

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 4  # vectors of a program


def pack_behind_triton(
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    ends: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Pack vectors (batch, kv_heads, new, dim) into `packed_keys` and `packed_values`, contiguous uint8 (rows, dim):
    those of each segment from the row on that `ends`, LongTensor (batch * kv_heads,), and `first` add up to."""
    new, (key_dim, value_dim) = keys.shape[2], (keys.shape[3], values.shape[3])
    count = ends.numel() * new
    with torch.cuda.device_of(keys):  # triton launches on the current device
        _pack_fp8[(triton.cdiv(count, BLOCK_ROWS), 2)](
            keys.contiguous(),
            values.contiguous(),
            *scales,
            ends.contiguous(),
            first,
            packed_keys,
            packed_values,
            count,
            new,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_KEY_DIM=triton.next_power_of_2(key_dim),
            BLOCK_VALUE_DIM=triton.next_power_of_2(value_dim),
            BLOCK_ROWS=BLOCK_ROWS,
        )


@triton.jit
def _bytes(numbers):
    """fp32 numbers as the nearest e4m3 floats, ties to even; what is too large as the largest. Bits, since not every
    device has these floats."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(numbers), 448.0)
    pattern = size.to(tl.int32, bitcast=True)
    rounded = (pattern + 0x7FFFF + ((pattern >> 20) & 1) >> 20) - (120 << 3)  # the bias is 7, not 127
    steps = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # of 2 ** -9: numbers below 2 ** -6
    code = tl.where(size < 0.015625, steps, rounded)
    code = tl.where(numbers != numbers, 127, code)
    return (code | (bits >> 24 & 128)).to(tl.uint8)


@triton.jit
def _pack_rows(
    vectors, scale, ends, first, packed, count, new, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row, dim = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    is_there = (row < count)[:, None] & (dim < DIM)
    at = tl.load(ends + row // new, mask=row < count, other=0) + first + row % new
    numbers = tl.load(vectors + row[:, None] * DIM + dim, mask=is_there, other=0.0).to(tl.float32)
    tl.store(packed + at[:, None] * DIM + dim, _bytes(tl.div_rn(numbers, tl.load(scale))), mask=is_there)


@triton.jit(do_not_specialize=["first"])
def _pack_fp8(
    keys,  # (count, KEY_DIM)
    values,  # (count, VALUE_DIM)
    key_scale,  # (1,)
    value_scale,
    ends,  # (count / new,)
    first,  # the first row behind each of `ends`
    packed_keys,  # out: rows of bytes
    packed_values,  # out
    count,
    new,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _pack_rows(keys, key_scale, ends, first, packed_keys, count, new, KEY_DIM, BLOCK_KEY_DIM, BLOCK_ROWS)
    else:
        _pack_rows(values, value_scale, ends, first, packed_values, count, new, VALUE_DIM, BLOCK_VALUE_DIM, BLOCK_ROWS)
