"""Triton kernels for column sums. Import this module only if Triton is installed.

The first kernel computes each query's log-sum-exp over the keys it sees, less the logarithm of its weight, a block of
queries per program. The second sums exp(logit - that) over the queries, a block of keys per program. Neither writes the
attention matrix. Both skip blocks of keys after all queries of a block, queries before the first nonzero weight, and
pads, and mask only the blocks in which some pairs do not count."""

import math

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 16384  # of a block loaded in the loop
MOST_ROWS = 64  # of a block loaded in the loop


def column_sums_triton(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute column sums; arguments and result are as in column_sums.py.

    Inputs are fp16, bf16 or fp32, and products are summed in fp32. The host does not wait."""
    batch, heads, columns, head_dim = queries.shape
    kv_heads, device = keys.shape[1], keys.device
    queries, keys = (states if states.stride(3) == 1 else states.contiguous() for states in (queries, keys))
    if padding is None:
        padding = torch.zeros(1, 1, dtype=torch.long, device=device)
    padding = padding.expand(batch, kv_heads).contiguous()
    if weights is None:
        weights = torch.ones(1, 1, device=device, dtype=torch.float32).expand(batch, columns)
    weights = weights.float().contiguous()
    first = (weights != 0).int().argmax(1)
    sums = torch.empty(batch, heads, columns, device=device, dtype=torch.float32)
    log_sums = torch.empty_like(sums)

    blocks = blocks_of(head_dim, keys.dtype)
    grid = (triton.cdiv(columns, blocks["STAYING"]), batch * heads)
    strides = (*queries.stride()[:3], *keys.stride()[:3])
    shape = (columns, heads, scaling * math.log2(math.e))
    fixed = {"GROUPS": heads // kv_heads, "HEAD_DIM": head_dim, **blocks}
    with torch.cuda.device_of(keys):  # triton launches on the current device
        _sum_rows[grid](queries, keys, padding, first, weights, log_sums, *strides, *shape, **fixed)
        _sum_columns[grid](queries, keys, padding, first, log_sums, sums, *strides, *shape, **fixed)
    return sums.unflatten(1, (kv_heads, -1)).mean(2)


def blocks_of(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the kernels' block sizes and warps: of those without a spilled register (`python -m
    benchmarks.gpu.offline`), the fastest on an H100.

    Blocks are smaller in fp32, whose products do not use tensor cores."""
    block_dim = max(16, triton.next_power_of_2(head_dim))
    moving = min(MOST_ROWS, max(16, BLOCK_BYTES // (block_dim * dtype.itemsize)))
    if dtype != torch.float32:
        return {"BLOCK_DIM": block_dim, "STAYING": moving, "MOVING": moving, "num_warps": 4}
    moving = min(moving, 32 if block_dim < 128 else 16)
    return {"BLOCK_DIM": block_dim, "STAYING": 32, "MOVING": moving, "num_warps": 8}


@triton.jit
def _seen_more(
    q, keys, dim, is_dim, asking, at, pad, columns, key_column, scaling, maximum, total,
    MOVING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the maxima and sums of the queries' softmax, `MOVING` keys later."""
    seen = at + tl.arange(0, MOVING)
    k_at = keys + seen[None, :].to(tl.int64) * key_column + dim[:, None]
    k = tl.load(k_at, mask=(seen < columns)[None, :] & is_dim[:, None] if MASKED else is_dim[:, None], other=0.0)
    logits = tl.dot(q, k, input_precision="ieee") * scaling
    if MASKED:
        logits = tl.where((seen[None, :] <= asking[:, None]) & (seen >= pad)[None, :], logits, -1e30)
    higher = tl.maximum(maximum, tl.max(logits, 1))
    total = total * tl.exp2(maximum - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
    return higher, total


@triton.jit
def _sum_rows(
    queries,  # (batch, heads, columns, HEAD_DIM)
    keys,  # (batch, kv_heads, columns, HEAD_DIM)
    padding,  # (batch, kv_heads)
    first,  # (batch,), the first query with a nonzero weight
    weights,  # (batch, columns)
    log_sums,  # out: (batch, heads, columns), to base 2, less the weight's logarithm: infinite where that is 0
    query_row,
    query_head,
    query_column,
    key_row,
    key_head,
    key_column,
    columns,
    heads,
    scaling,  # times log2(e)
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAYING: tl.constexpr,
    MOVING: tl.constexpr,
):
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    kv_head = head // GROUPS
    pad = tl.load(padding + row * (heads // GROUPS) + kv_head).to(tl.int32)
    start = tl.load(first + row).to(tl.int32)
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    keys += row * key_row + kv_head * key_head

    asking = block * STAYING + tl.arange(0, STAYING)
    q_at = queries + row * query_row + head * query_head + asking[:, None].to(tl.int64) * query_column + dim
    q = tl.load(q_at, mask=(asking < columns)[:, None] & is_dim, other=0.0)
    # Not -inf: the differences must be numbers before a query has seen a key.
    maximum = tl.full((STAYING,), -1e30, tl.float32)
    total = tl.zeros((STAYING,), tl.float32)
    end = tl.minimum(block * STAYING + STAYING, columns)
    end = tl.where(end > start, end, 0)
    lowest = pad // MOVING * MOVING
    # Without pads, every query of the block sees all keys before the block.
    whole = tl.where(pad == 0, tl.minimum(block * STAYING, end), lowest)
    for at in range(lowest, whole, MOVING):
        maximum, total = _seen_more(
            q, keys, dim, is_dim, asking, at, pad, columns, key_column, scaling, maximum, total, MOVING, False
        )
    for at in range(whole, end, MOVING):
        maximum, total = _seen_more(
            q, keys, dim, is_dim, asking, at, pad, columns, key_column, scaling, maximum, total, MOVING, True
        )
    weight = tl.load(weights + row * columns + asking, mask=asking < columns, other=0.0)
    log_sum = tl.where(weight > 0, maximum + tl.log2(total) - tl.log2(weight), float("inf"))
    tl.store(log_sums + row_head * columns + asking, log_sum, mask=asking < columns)


@triton.jit
def _asked_more(
    k, queries, log_sums, dim, is_dim, seen, at, pad, columns, query_column, scaling, total,
    MOVING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the sums of the keys, not yet added over `MOVING` places, after as many queries."""
    asking = at + tl.arange(0, MOVING)
    is_query = asking < columns
    q_at = queries + asking[None, :].to(tl.int64) * query_column + dim[:, None]
    if MASKED:
        q = tl.load(q_at, mask=is_query[None, :] & is_dim[:, None], other=0.0)
        log_sum = tl.load(log_sums + asking, mask=is_query, other=float("inf"))
    else:
        q = tl.load(q_at, mask=is_dim[:, None], other=0.0)
        log_sum = tl.load(log_sums + asking)
    share = tl.exp2(tl.dot(k, q, input_precision="ieee") * scaling - log_sum[None, :])
    if MASKED:
        share = tl.where((seen[:, None] <= asking[None, :]) & (seen >= pad)[:, None], share, 0.0)
    return total + share


@triton.jit
def _sum_columns(
    queries,  # (batch, heads, columns, HEAD_DIM)
    keys,  # (batch, kv_heads, columns, HEAD_DIM)
    padding,  # (batch, kv_heads)
    first,  # (batch,), the first query with a nonzero weight
    log_sums,  # (batch, heads, columns)
    sums,  # out: (batch, heads, columns)
    query_row,
    query_head,
    query_column,
    key_row,
    key_head,
    key_column,
    columns,
    heads,
    scaling,  # times log2(e)
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAYING: tl.constexpr,
    MOVING: tl.constexpr,
):
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    kv_head = head // GROUPS
    pad = tl.load(padding + row * (heads // GROUPS) + kv_head).to(tl.int32)
    start = tl.load(first + row).to(tl.int32)
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    queries += row * query_row + head * query_head
    log_sums += row_head * columns

    seen = block * STAYING + tl.arange(0, STAYING)
    k_at = keys + row * key_row + kv_head * key_head + seen[:, None].to(tl.int64) * key_column + dim
    k = tl.load(k_at, mask=(seen < columns)[:, None] & is_dim, other=0.0)
    total = tl.zeros((STAYING, MOVING), tl.float32)
    start = tl.maximum(tl.maximum(start, pad), block * STAYING) // MOVING * MOVING  # of the queries that may see a key
    # Behind the keys' own block, and that of the first query, every query sees every key.
    whole = tl.minimum(tl.maximum(start + MOVING, block * STAYING + STAYING), columns)
    end = tl.maximum(whole, columns // MOVING * MOVING)
    for at in range(start, whole, MOVING):
        total = _asked_more(
            k, queries, log_sums, dim, is_dim, seen, at, pad, columns, query_column, scaling, total, MOVING, True
        )
    for at in range(whole, end, MOVING):
        total = _asked_more(
            k, queries, log_sums, dim, is_dim, seen, at, pad, columns, query_column, scaling, total, MOVING, False
        )
    for at in range(end, columns, MOVING):
        total = _asked_more(
            k, queries, log_sums, dim, is_dim, seen, at, pad, columns, query_column, scaling, total, MOVING, True
        )
    share = tl.where(seen >= pad, tl.sum(total, 1), 0.0)
    tl.store(sums + row_head * columns + seen, share, mask=seen < columns)
