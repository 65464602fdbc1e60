"""Triton kernels that move entries into ragged segments and back. Import this module only if Triton is installed.

Their references are the plain PyTorch of `cache.storage.ragged.RaggedStorage`, which launches 40 kernels for what these
do. Dense keys and values are (batch, kv_heads, slots, head_dim), aligned to the right, with `columns`, LongTensor
(batch, kv_heads, slots), -1 in unused slots. Ragged ones are (rows, head_dim): each KV head of each row of the batch is
a segment, followed by `room` spare rows. Numbers may have any dtype. The host does not wait."""

import torch
import triton
import triton.language as tl

MOST_ROWS = 64  # of a block
BLOCK_BYTES = 8192


def to_segments(
    keys: torch.Tensor, values: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor, total: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay dense entries out as segments.

    Args:
        counts: LongTensor (batch, kv_heads), the slots in use, `total` together.

    Returns:
        Keys and values (total + room * segments, head_dim), zero in spare rows; int32 (total,), the columns in the
            order of segments; LongTensor (batch, kv_heads), each segment's first row.
    """
    keys, values, counts = keys.contiguous(), values.contiguous(), counts.contiguous()
    segments, slots = counts.numel(), columns.shape[2]
    flat_keys, flat_values = (part.new_empty(total + room * segments, part.shape[3]) for part in (keys, values))
    flat_columns = columns.new_empty(total, dtype=torch.int32)
    starts = torch.empty_like(counts)
    sizes = sizes_of(keys.shape[-1], values.shape[-1], keys.dtype)
    grid = (segments, triton.cdiv(max(slots + room, 1), sizes["BLOCK"]))
    dense, ragged = (keys, values, columns.contiguous()), (flat_keys, flat_values, flat_columns)
    with torch.cuda.device_of(keys):  # triton launches on the current device
        _to_segments[grid](
            *dense, counts, *ragged, starts, slots, room, SEGMENTS=triton.next_power_of_2(segments), **sizes
        )
    return *ragged, starts


def from_segments(
    keys: torch.Tensor,
    values: torch.Tensor,
    columns: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    behind: int,
    appended: int,
    room: int,
    seen: int,
    slots: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dense keys, values and columns of `slots` entries, zeros in unused ones.

    Args:
        columns: int32, of all entries but the last `appended` tokens of each segment, whose columns end with `seen`.
        lengths: LongTensor (batch, kv_heads), entries of each segment without the last tokens `behind`.
        room: spare rows behind each segment that are left.
    """
    shape = (*starts.shape, slots)
    dense_keys, dense_values = (part.new_empty(*shape, part.shape[1]) for part in (keys, values))
    dense_columns = starts.new_empty(shape)
    sizes = sizes_of(keys.shape[-1], values.shape[-1], keys.dtype)
    grid = (starts.numel(), triton.cdiv(slots, sizes["BLOCK"]))
    ragged, dense = (keys, values, columns, starts, lengths), (dense_keys, dense_values, dense_columns)
    with torch.cuda.device_of(keys):
        _from_segments[grid](*ragged, *dense, behind, appended, room, seen, slots, **sizes)
    return dense


def sizes_of(key_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of the kernels' rows and blocks."""
    block_key, block_value = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    fitting = BLOCK_BYTES // (max(block_key, block_value) * dtype.itemsize)
    sizes = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_KEY_DIM": block_key, "BLOCK_VALUE_DIM": block_value}
    return {**sizes, "BLOCK": min(max(fitting, 1), MOST_ROWS)}


@triton.jit
def _copy(source, target, from_row, to_row, is_read, is_written, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Copy rows of DIM numbers; zeros where a row is written but not read."""
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    read = is_read[:, None] & (dim < DIM)
    numbers = tl.load(source + from_row[:, None] * DIM + dim, mask=read, other=0)
    tl.store(target + to_row[:, None] * DIM + dim, numbers, mask=is_written[:, None] & (dim < DIM))


@triton.jit(do_not_specialize=["slots", "room"])
def _to_segments(
    keys,  # (segments, slots, KEY_DIM)
    values,  # (segments, slots, VALUE_DIM)
    columns,  # (segments, slots)
    counts,  # (segments,)
    flat_keys,  # out: (rows, KEY_DIM)
    flat_values,  # out: (rows, VALUE_DIM)
    flat_columns,  # out: (entries,)
    starts,  # out: (segments,)
    slots,
    room,
    SEGMENTS: tl.constexpr,  # a power of 2, at least their number
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    other = tl.arange(0, SEGMENTS)
    first = tl.sum(tl.load(counts + other, mask=other < segment, other=0), 0)  # entries of the segments before
    start, count = first + segment * room, tl.load(counts + segment)
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_used, is_row = place < count, place < count + room
    slot = segment * slots + slots - count + place
    _copy(keys, flat_keys, slot, start + place, is_used, is_row, KEY_DIM, BLOCK_KEY_DIM)
    _copy(values, flat_values, slot, start + place, is_used, is_row, VALUE_DIM, BLOCK_VALUE_DIM)
    column = tl.load(columns + slot, mask=is_used, other=0)
    tl.store(flat_columns + first + place, column.to(tl.int32), mask=is_used)
    if block == 0:
        tl.store(starts + segment, start)


@triton.jit(do_not_specialize=["behind", "appended", "room", "seen", "slots"])
def _from_segments(
    keys,  # (rows, KEY_DIM)
    values,  # (rows, VALUE_DIM)
    columns,  # (entries without appended tokens,)
    starts,  # (segments,)
    lengths,  # (segments,)
    dense_keys,  # out: (segments, slots, KEY_DIM)
    dense_values,  # out: (segments, slots, VALUE_DIM)
    dense_columns,  # out: (segments, slots)
    behind,
    appended,
    room,
    seen,
    slots,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, size = tl.load(starts + segment), tl.load(lengths + segment) + behind
    slot = block * BLOCK + tl.arange(0, BLOCK)
    place = slot - slots + size
    is_slot = slot < slots
    is_used = is_slot & (place >= 0)
    to = segment * slots + slot
    _copy(keys, dense_keys, start + place, to, is_used, is_slot, KEY_DIM, BLOCK_KEY_DIM)
    _copy(values, dense_values, start + place, to, is_used, is_slot, VALUE_DIM, BLOCK_VALUE_DIM)
    first = start - segment * (room + appended)  # entries of the segments before, without appended tokens
    is_known = is_used & (place < size - appended)
    known = tl.load(columns + first + place, mask=is_known, other=0).to(tl.int64)
    column = tl.where(is_known, known, tl.where(is_used, seen - size + place, -1))
    tl.store(dense_columns + to, column, mask=is_slot)
