"""The Triton kernel of groups: a program attends with the query heads of one KV head over its part of each block, and
of what waits in full precision. Import it only where triton is installed.
"""

import torch
import triton
import triton.language as tl

from .pieces import Pieces
from .ragged_decode_triton import attended, blocks_of, combined, empty_parts, splits_of

FIELDS = tl.constexpr(9)  # of a row's piece in the table


def grouped_decode_triton(
    query: torch.Tensor,
    pieces: Pieces,
    recent_keys: torch.Tensor,
    recent_values: torch.Tensor,
    recent: int,
    scaling: float,
    splits: int | None = None,
) -> torch.Tensor:
    """Arguments and result as in grouped.py; fp16, bf16 or fp32, sums in fp32. `splits`: parts of each block, a power
    of 2; None for as many as fill the device."""
    blocks, batch, kv_heads = pieces.ends.shape
    key_dim, value_dim = query.shape[3], recent_values.shape[3]
    segments, groups = batch * kv_heads, query.shape[1] // kv_heads
    sizes = group_blocks_of(key_dim, value_dim, query.dtype)
    splits = splits or splits_of(segments, triton.cdiv(pieces.longest, sizes["BLOCK_KEYS"]), query.device)
    query = query.contiguous()
    parts = empty_parts(query, value_dim, splits)
    scale = torch.empty(0, device=query.device, dtype=pieces.dtype)  # tells of their dtype
    with torch.cuda.device_of(query):  # triton launches on the current device
        _attend_groups[(segments, splits)](
            query,
            pieces.table,
            pieces.ends,
            recent_keys,
            recent_values,
            scale,
            *parts,
            blocks,
            batch,
            recent,
            recent_keys.shape[2],
            scaling,
            BITS=pieces.quantizer.bits,
            GROUP_SIZE=pieces.quantizer.group_size,
            IS_HQQ=pieces.quantizer.backend == "hqq",
            KV_HEADS=kv_heads,
            GROUPS=groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_GROUPS=max(16, triton.next_power_of_2(groups)),
            **sizes,
        )
        return combined(query, parts, sizes)


def group_blocks_of(key_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return `blocks_of` groups, as many keys as leave no register to spill."""
    blocks = blocks_of(key_dim, value_dim, dtype, is_packed=True)
    if dtype != torch.float32:
        return {**blocks, "num_warps": 8}
    is_wide = max(blocks["BLOCK_KEY_DIM"], blocks["BLOCK_VALUE_DIM"]) > 128
    return {**blocks, "BLOCK_KEYS": 16 if is_wide else 32, "num_warps": 16 if is_wide else 8}


@triton.jit
def _numbers(fields, scale, at, is_there, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, IS_HQQ: tl.constexpr):
    """The numbers `at` these places of what the `fields` tell of (pieces.py has the layout), fp32."""
    codes = tl.load(fields).to(tl.pointer_type(tl.uint8))
    scales, zeros = tl.load(fields + 1).to(scale.dtype), tl.load(fields + 2).to(scale.dtype)
    rows = tl.load(fields + 3).to(tl.int32)
    group = (at // GROUP_SIZE).to(tl.int32)
    place = group // rows  # among the groups of a byte
    shift = BITS * ((8 // BITS - 1 - place) if IS_HQQ else place)
    byte = tl.load(codes + (at - (place * rows).to(tl.int64) * GROUP_SIZE), mask=is_there, other=0).to(tl.int32)
    code = (byte >> shift & (2**BITS - 1)).to(tl.float32)
    factor = tl.load(scales + group, mask=is_there, other=0.0).to(tl.float32)
    zero = tl.load(zeros + group, mask=is_there, other=0.0).to(tl.float32)
    return (code - zero) * factor if IS_HQQ else code * factor - zero


@triton.jit(do_not_specialize=["blocks", "batch", "recent", "capacity"])
def _attend_groups(
    query,  # (segments * GROUPS, KEY_DIM)
    table,  # (blocks, batch, FIELDS)
    ends,  # (blocks, batch, KV_HEADS)
    recent_keys,  # (segments, capacity, KEY_DIM)
    recent_values,  # (segments, capacity, VALUE_DIM)
    scale,  # of the dtype of scales and zeros, not read
    partial,  # out: (segments * GROUPS, splits, VALUE_DIM), not yet divided by the sums
    maxima,  # out: (segments * GROUPS, splits)
    sums,  # out: (segments * GROUPS, splits)
    blocks,
    batch,
    recent,
    capacity,
    scaling,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_HQQ: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    segment, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    group = tl.arange(0, BLOCK_GROUPS)
    row = segment * GROUPS + group
    key_dim, value_dim = tl.arange(0, BLOCK_KEY_DIM), tl.arange(0, BLOCK_VALUE_DIM)
    is_group, is_key_dim, is_value_dim = group < GROUPS, key_dim < KEY_DIM, value_dim < VALUE_DIM
    q = tl.load(query + row[:, None] * KEY_DIM + key_dim, mask=is_group[:, None] & is_key_dim, other=0.0)

    maximum = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUPS,), tl.float32)
    output = tl.zeros((BLOCK_GROUPS, BLOCK_VALUE_DIM), tl.float32)
    for block in range(blocks):
        piece, head = block * batch + segment // KV_HEADS, segment % KV_HEADS
        fields = table + piece * FIELDS
        entries = tl.load(fields + 8)
        begin = tl.load(ends + piece * KV_HEADS + head - 1, mask=head > 0, other=0)
        last = tl.load(ends + piece * KV_HEADS + head)
        part = tl.cdiv(tl.cdiv(last - begin, splits), BLOCK_KEYS) * BLOCK_KEYS
        end = tl.minimum(begin + (split + 1) * part, last)
        for at in range(begin + split * part, end, BLOCK_KEYS):
            entry = at + tl.arange(0, BLOCK_KEYS)
            is_entry = entry < end
            k_at, v_at = key_dim[:, None] * entries + entry[None, :], entry[:, None] * VALUE_DIM + value_dim[None, :]
            k = _numbers(fields, scale, k_at, is_entry[None, :] & is_key_dim[:, None], BITS, GROUP_SIZE, IS_HQQ)
            v = _numbers(fields + 4, scale, v_at, is_entry[:, None] & is_value_dim[None, :], BITS, GROUP_SIZE, IS_HQQ)
            k, v = k.to(q.dtype), v.to(q.dtype)
            maximum, total, output = attended(q, k, v, is_entry, scaling, maximum, total, output)

    part = tl.cdiv(tl.cdiv(recent, splits), BLOCK_KEYS) * BLOCK_KEYS
    end = tl.minimum((split + 1) * part, recent)
    for at in range(split * part, end, BLOCK_KEYS):
        entry = at + tl.arange(0, BLOCK_KEYS)
        is_entry = entry < end
        place = segment.to(tl.int64) * capacity + entry
        k_mask, v_mask = is_entry[None, :] & is_key_dim[:, None], is_entry[:, None] & is_value_dim[None, :]
        k = tl.load(recent_keys + place[None, :] * KEY_DIM + key_dim[:, None], mask=k_mask, other=0.0)
        v = tl.load(recent_values + place[:, None] * VALUE_DIM + value_dim[None, :], mask=v_mask, other=0.0)
        maximum, total, output = attended(q, k, v, is_entry, scaling, maximum, total, output)

    place = row * splits + split
    tl.store(partial + place[:, None] * VALUE_DIM + value_dim, output, mask=is_group[:, None] & is_value_dim)
    tl.store(maxima + place, maximum, mask=is_group)
    tl.store(sums + place, total, mask=is_group)
