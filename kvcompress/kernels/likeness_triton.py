"""Triton kernels for the mean likeness of keys. Import this module only if Triton is installed.

The first kernel finds, for each key, the other key that it leaves out; the second averages each key's cosines with all
others. Neither writes the cosines, so that launches and memory do not depend on their number. Of keys in 16 bits,
tensor cores multiply the numbers as they are: the products are exact and their sums in fp32."""

import torch
import triton
import triton.language as tl

from . import column_sums_triton

LEAST_NORM = tl.constexpr(1e-12)  # as in torch.nn.functional.normalize


def mean_likeness_triton(
    keys: torch.Tensor, similar: float, padding: torch.Tensor | None, spares_first: bool = False
) -> torch.Tensor:
    """Compute the mean likeness; arguments and result are as in likeness.py. The host does not wait."""
    batch, kv_heads, columns, head_dim = keys.shape
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    pads = norms if padding is None else padding.expand(batch, kv_heads).contiguous()  # not read without padding
    left_out = torch.empty_like(norms, dtype=torch.int32)
    means = torch.empty_like(norms)
    blocks = blocks_of(head_dim, keys.dtype)
    grid = (triton.cdiv(columns, blocks["STAYING"]), batch * kv_heads)
    shape = (*keys.stride()[:3], columns, kv_heads)
    fixed = {"PADDED": padding is not None, "HEAD_DIM": head_dim, **blocks}
    with torch.cuda.device_of(keys):  # triton launches on the current device
        _leave_out[grid](keys, norms, pads, left_out, *shape, similar, SPARES_FIRST=spares_first, **fixed)
        _average[grid](keys, norms, pads, left_out, means, *shape, **fixed)
    return means


def blocks_of(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the kernels' block sizes and warps, with which no register spills (`python -m benchmarks.gpu.offline`)."""
    blocks = column_sums_triton.blocks_of(head_dim, dtype)
    return blocks | {"MOVING": min(blocks["MOVING"], 32)}


@triton.jit
def _loaded(keys, norms, column, columns, key_column, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return keys, (columns, BLOCK_DIM), and their norms."""
    dim = tl.arange(0, BLOCK_DIM)
    is_key = column < columns
    at = keys + column[:, None].to(tl.int64) * key_column + dim[None, :]
    key = tl.load(at, mask=is_key[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    return key, tl.maximum(tl.load(norms + column, mask=is_key, other=1.0), LEAST_NORM)


@triton.jit
def _leave_out(
    keys,  # (batch, kv_heads, columns, HEAD_DIM)
    norms,  # (batch, kv_heads, columns)
    padding,  # (batch, kv_heads), with PADDED
    left_out,  # out: (batch, kv_heads, columns), the column that each key leaves out, or -1
    key_row,
    key_head,
    key_column,
    columns,
    kv_heads,
    similar,
    SPARES_FIRST: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAYING: tl.constexpr,
    MOVING: tl.constexpr,
):
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys += row_head // kv_heads * key_row + row_head % kv_heads * key_head
    pad = 0
    if PADDED:
        pad = tl.load(padding + row_head).to(tl.int32)
    column = block * STAYING + tl.arange(0, STAYING)
    key, norm = _loaded(keys, norms + row_head * columns, column, columns, key_column, HEAD_DIM, BLOCK_DIM)
    latest = tl.full((STAYING,), -1, tl.int32)
    for at in range(pad // MOVING * MOVING, columns, MOVING):
        other = at + tl.arange(0, MOVING)
        others, their = _loaded(keys, norms + row_head * columns, other, columns, key_column, HEAD_DIM, BLOCK_DIM)
        cosine = tl.dot(key, tl.trans(others), input_precision="ieee") / (norm[:, None] * their[None, :])
        is_other = (other >= pad) & (other < columns) & (other[None, :] != column[:, None])
        latest = tl.maximum(latest, tl.max(tl.where(is_other & (cosine > similar), other[None, :], -1), 1))
    if SPARES_FIRST:
        latest = tl.maximum(latest, pad)
    tl.store(left_out + row_head * columns + column, latest, mask=column < columns)


@triton.jit
def _average(
    keys,  # (batch, kv_heads, columns, HEAD_DIM)
    norms,  # (batch, kv_heads, columns)
    padding,  # (batch, kv_heads), with PADDED
    left_out,  # (batch, kv_heads, columns)
    means,  # out: (batch, kv_heads, columns)
    key_row,
    key_head,
    key_column,
    columns,
    kv_heads,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAYING: tl.constexpr,
    MOVING: tl.constexpr,
):
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys += row_head // kv_heads * key_row + row_head % kv_heads * key_head
    pad = 0
    if PADDED:
        pad = tl.load(padding + row_head).to(tl.int32)
    column = block * STAYING + tl.arange(0, STAYING)
    key, norm = _loaded(keys, norms + row_head * columns, column, columns, key_column, HEAD_DIM, BLOCK_DIM)
    total = tl.zeros((STAYING, MOVING), tl.float32)
    for at in range(pad // MOVING * MOVING, columns, MOVING):
        other = at + tl.arange(0, MOVING)
        others, their = _loaded(keys, norms + row_head * columns, other, columns, key_column, HEAD_DIM, BLOCK_DIM)
        cosine = tl.dot(key, tl.trans(others), input_precision="ieee") / (norm[:, None] * their[None, :])
        without = tl.load(left_out + row_head * columns + other, mask=other < columns, other=-1)
        counts = (other >= pad) & (other < columns) & (other[None, :] != column[:, None])
        total += tl.where(counts & (without[None, :] != column[:, None]), cosine, 0.0)
    mean = tl.where(column >= pad, tl.sum(total, 1) / (columns - pad), float("-inf"))
    tl.store(means + row_head * columns + column, mean, mask=column < columns)
