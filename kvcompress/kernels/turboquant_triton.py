"""The Triton kernels of TurboQuant beside attention itself (ragged_decode_triton.py): a token's keys and values are
rotated, packed and written in one launch; queries are rotated in one; parts of the attention are combined and rotated
back in one. Import it only where triton is installed.
"""

import torch
import triton
import triton.language as tl

from .turboquant import TurboQuant

BLOCK_ROWS = 16  # vectors of a program: the fewest that a matrix product takes
CHUNK = 16  # of a vector's numbers that are multiplied at once: a rotation is too large for the registers


def pack_behind_triton(
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    ends: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    codecs: tuple[TurboQuant, TurboQuant],
) -> None:
    """As in packed.py, in one launch; vectors of any float dtype, rotated in fp32."""
    new = keys.shape[2]
    count = ends.numel() * new
    with torch.cuda.device_of(keys):  # triton launches on the current device
        _pack[(triton.cdiv(count, BLOCK_ROWS), 2)](
            keys.contiguous(),
            values.contiguous(),
            *(codec.rotation for codec in codecs),
            *(codec.boundaries for codec in codecs),
            ends.contiguous(),
            first,
            packed_keys,
            packed_values,
            count,
            new,
            BITS=codecs[0].bits,
            KEY_DIM=codecs[0].dim,
            VALUE_DIM=codecs[1].dim,
            BLOCK_KEY_DIM=block_of(codecs[0].dim),
            BLOCK_VALUE_DIM=block_of(codecs[1].dim),
            BLOCK_ROWS=BLOCK_ROWS,
            CHUNK=CHUNK,
        )


def rotate_triton(vectors: torch.Tensor, codec: TurboQuant) -> torch.Tensor:
    """`codec.rotate`, in one launch."""
    vectors = vectors.contiguous()
    rotated = torch.empty_like(vectors)
    count = vectors.numel() // codec.dim
    with torch.cuda.device_of(vectors):
        _rotate[(triton.cdiv(count, BLOCK_ROWS),)](
            vectors,
            codec.rotation,
            rotated,
            count,
            DIM=codec.dim,
            BLOCK_DIM=block_of(codec.dim),
            BLOCK_ROWS=BLOCK_ROWS,
            CHUNK=CHUNK,
            num_warps=warps_of(codec.dim),
        )
    return rotated


def combine_back_triton(
    partial: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, codec: TurboQuant, output: torch.Tensor
) -> None:
    """What `combine` of ragged_decode_triton.py does, and `codec.rotate_back`, into `output`, contiguous."""
    rows, splits, dim = partial.shape
    with torch.cuda.device_of(partial):
        _combine_back[(rows,)](
            partial,
            maxima,
            sums,
            codec.rotation,
            output,
            SPLITS=splits,
            DIM=dim,
            BLOCK_DIM=block_of(dim),
            CHUNK=CHUNK,
        )


def warps_of(dim: int) -> int:
    """Return the warps that rotate vectors without a spilled register (`python -m benchmarks.gpu.offline`)."""
    return 4 if block_of(dim) < 256 else 8


def block_of(dim: int) -> int:
    """A power of 2, and what a matrix product needs."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def _rotated(
    vectors,
    rotation,
    row,
    is_row,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The rows' vectors, rotated, and their squared norms, fp32."""
    dim = tl.arange(0, BLOCK_DIM)
    turned = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    squares = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(0, DIM, CHUNK):
        at = first + tl.arange(0, CHUNK)
        is_at = at < DIM
        part = tl.load(vectors + row[:, None] * DIM + at, mask=is_row[:, None] & is_at, other=0.0).to(tl.float32)
        turn = tl.load(rotation + dim * DIM + at[:, None], mask=(dim < DIM) & is_at[:, None], other=0.0)
        turned += tl.dot(part, turn, input_precision="ieee")
        squares += tl.sum(part * part, 1)
    return turned, squares


@triton.jit
def _rotate(
    vectors,  # (count, DIM)
    rotation,  # (DIM, DIM)
    rotated,  # out: (count, DIM)
    count,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, dim = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    turned, _ = _rotated(vectors, rotation, row, row < count, DIM, BLOCK_DIM, BLOCK_ROWS, CHUNK)
    is_there = (row < count)[:, None] & (dim < DIM)
    tl.store(rotated + row[:, None] * DIM + dim, turned.to(rotated.dtype.element_ty), mask=is_there)


@triton.jit
def _pack_rows(
    vectors,
    rotation,
    boundaries,
    ends,
    first,
    packed,
    count,
    new,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row, dim = row < count, tl.arange(0, BLOCK_DIM)
    turned, squares = _rotated(vectors, rotation, row, is_row, DIM, BLOCK_DIM, BLOCK_ROWS, CHUNK)
    norm = tl.sqrt(squares)
    unit = turned / tl.maximum(norm, 1.1754943508222875e-38)[:, None]  # the least normal number
    codes = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.int32)
    for boundary in tl.static_range(2**BITS - 1):
        codes += (unit > tl.load(boundaries + boundary)).to(tl.int32)
    codes = tl.where(dim < DIM, codes, 0)

    EIGHTS: tl.constexpr = (DIM + 7) // 8
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS  # of the first string of bits (turboquant.py has the layout)
    codes = tl.reshape(codes, (BLOCK_ROWS, BLOCK_DIM // 8, 8))
    place, eight = tl.arange(0, 8)[None, None, :], tl.arange(0, BLOCK_DIM // 8)
    is_stored = is_row[:, None] & (eight < EIGHTS)
    at = tl.load(ends + row // new, mask=is_row, other=0) + first + row % new
    to = packed + at[:, None] * (BITS * EIGHTS + 2)
    string = tl.sum((codes & (2**WIDTH - 1)) << (place * WIDTH), 2)
    for byte in tl.static_range(WIDTH):
        tl.store(to + eight * WIDTH + byte, (string >> (8 * byte) & 255).to(tl.uint8), mask=is_stored)
    if BITS == 3:
        high = tl.sum((codes >> 2 & 1) << place, 2)
        tl.store(to + 2 * EIGHTS + eight, high.to(tl.uint8), mask=is_stored)
    half = tl.minimum(norm, 65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    byte = tl.arange(0, 2)
    tl.store(to + BITS * EIGHTS + byte, (half[:, None] >> (8 * byte) & 255).to(tl.uint8), mask=is_row[:, None])


@triton.jit(do_not_specialize=["first"])
def _pack(
    keys,  # (count, KEY_DIM)
    values,  # (count, VALUE_DIM)
    key_rotation,  # (KEY_DIM, KEY_DIM)
    value_rotation,
    key_boundaries,  # (2 ** BITS - 1,)
    value_boundaries,
    ends,  # (count / new,)
    first,  # the first row behind each of `ends`
    packed_keys,  # out: rows of bytes
    packed_values,  # out
    count,
    new,
    BITS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _pack_rows(
            keys, key_rotation, key_boundaries, ends, first, packed_keys, count, new, BITS, KEY_DIM, BLOCK_KEY_DIM,
            BLOCK_ROWS, CHUNK,
        )  # fmt: skip
    else:
        _pack_rows(
            values, value_rotation, value_boundaries, ends, first, packed_values, count, new, BITS, VALUE_DIM,
            BLOCK_VALUE_DIM, BLOCK_ROWS, CHUNK,
        )  # fmt: skip


@triton.jit
def _combine_back(
    partial,  # (rows, SPLITS, DIM)
    maxima,  # (rows, SPLITS), -inf where a part had no keys
    sums,  # (rows, SPLITS)
    rotation,  # (DIM, DIM)
    output,  # out: (rows, DIM)
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    place, dim = row * SPLITS + tl.arange(0, SPLITS), tl.arange(0, BLOCK_DIM)
    maximum = tl.load(maxima + place)
    weight = tl.exp(maximum - tl.max(maximum, 0))
    weight /= tl.sum(weight * tl.load(sums + place), 0)
    turned = tl.zeros((BLOCK_DIM,), tl.float32)
    for first in range(0, DIM, CHUNK):
        at = first + tl.arange(0, CHUNK)
        is_at = at < DIM
        parts = tl.load(partial + place[:, None] * DIM + at, mask=is_at[None, :], other=0.0)
        mean = tl.sum(weight[:, None] * parts, 0)
        turn = tl.load(rotation + at[:, None] * DIM + dim, mask=is_at[:, None] & (dim < DIM), other=0.0)
        turned += tl.sum(mean[:, None] * turn, 0)
    tl.store(output + row * DIM + dim, turned.to(output.dtype.element_ty), mask=dim < DIM)
