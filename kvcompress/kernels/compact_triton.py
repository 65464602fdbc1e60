"""Triton kernel that copies kept rows. Import this module only if Triton is installed."""

import torch
import triton
import triton.language as tl

BLOCK = 32  # kept rows per program


def compact_triton(
    keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values in one launch, reading and writing each kept row once; arguments and results as in
    compact.py."""
    keys, values = (states if states.stride(3) == 1 else states.contiguous() for states in (keys, values))
    batch, kv_heads, kept = indices.shape
    kept_keys, kept_values = (states.new_empty(*indices.shape, states.shape[3]) for states in (keys, values))
    key_dim, value_dim = keys.shape[3], values.shape[3]
    with torch.cuda.device_of(keys):  # triton launches on the current device
        _move[(triton.cdiv(kept, BLOCK), batch * kv_heads)](
            keys,
            values,
            indices.contiguous(),
            kept_keys,
            kept_values,
            *keys.stride()[:3],
            *values.stride()[:3],
            kv_heads,
            kept,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_KEY_DIM=triton.next_power_of_2(key_dim),
            BLOCK_VALUE_DIM=triton.next_power_of_2(value_dim),
            BLOCK=BLOCK,
        )
    return kept_keys, kept_values


@triton.jit
def _move(
    keys,  # (batch, kv_heads, columns, KEY_DIM)
    values,  # (batch, kv_heads, columns, VALUE_DIM)
    indices,  # (batch, kv_heads, kept)
    kept_keys,  # out: (batch, kv_heads, kept, KEY_DIM)
    kept_values,  # out: (batch, kv_heads, kept, VALUE_DIM)
    key_row,
    key_head,
    key_column,
    value_row,
    value_head,
    value_column,
    kv_heads,
    kept,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    slot = block * BLOCK + tl.arange(0, BLOCK)
    is_slot = (slot < kept)[:, None]
    column = tl.maximum(tl.load(indices + row_head * kept + slot, mask=slot < kept, other=0), 0)[:, None]
    place = (row_head * kept + slot)[:, None]

    dim = tl.arange(0, BLOCK_KEY_DIM)
    taken = is_slot & (dim < KEY_DIM)
    moved = tl.load(keys + row * key_row + head * key_head + column * key_column + dim, mask=taken)
    tl.store(kept_keys + place * KEY_DIM + dim, moved, mask=taken)

    value_at = tl.arange(0, BLOCK_VALUE_DIM)
    value_taken = is_slot & (value_at < VALUE_DIM)
    value_moved = tl.load(
        values + row * value_row + head * value_head + column * value_column + value_at, mask=value_taken
    )
    tl.store(kept_values + place * VALUE_DIM + value_at, value_moved, mask=value_taken)
