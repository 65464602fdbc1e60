"""Triton kernels that choose entries over all KV heads of a row. Import this module only if Triton is installed.

The reference is the plain PyTorch of `scoring.selection.adaptive_indices`, which launches 54 kernels for what these and
a sort do. One program reads a row's sorted entries twice: it counts what each head is guaranteed, and then drops the
worst entries beyond that. A second kernel lists what is left."""

import torch
import triton
import triton.language as tl

MOST_ENTRIES = 32768  # of a row, which one program reads; an estimate
BLOCK_NUMBERS = 8192  # entries of a block times heads
WARPS = 8
LIST_BLOCK = 1024
STAYS = tl.constexpr(torch.finfo(torch.float32).max / 2)  # from here on scores are of entries that must stay


def adaptive_triton(
    scores: torch.Tensor, totals: torch.Tensor, most: int, safeguard: float, blends: bool
) -> torch.Tensor:
    """Return the columns to keep, LongTensor (batch, kv_heads, most), as `adaptive_indices` does.

    Args:
        scores: (batch, kv_heads, columns) in fp32, -inf at pads.
        totals: LongTensor (batch,), entries that all heads of a row keep together.
        most: at least the entries that a head keeps.
        blends: whether heads are guaranteed `blended_shares` or `safe_shares`.
    """
    batch, kv_heads, columns = scores.shape
    # The best last, of equals the latest column and of a column the last head.
    ordered, order = scores.transpose(1, 2).flatten(1).sort(dim=1, stable=True)
    is_lost = torch.empty(scores.shape, dtype=torch.int8, device=scores.device)
    counts = totals.new_empty(batch, kv_heads)
    kept = totals.new_empty(batch, kv_heads, most)
    heads = triton.next_power_of_2(kv_heads)
    fixed = {"SAFEGUARD": safeguard, "BLENDS": blends, "HEADS": heads, "BLOCK": block_of(heads), "num_warps": WARPS}
    with torch.cuda.device_of(scores):  # triton launches on the current device
        # Without fused products, whose remainders differ from the reference's.
        _drop[(batch,)](ordered, order, totals, is_lost, counts, columns, kv_heads, enable_fp_fusion=False, **fixed)
        _list[(batch * kv_heads,)](is_lost, counts, kept, columns, most, BLOCK=LIST_BLOCK)
    return kept


def block_of(heads: int) -> int:
    """Return the entries of a block, given a power of 2."""
    return max(16, BLOCK_NUMBERS // heads)


@triton.jit
def _flags(order, place, entries, kv_heads, HEADS: tl.constexpr):
    """Return which head each entry at these places of the order is of, (BLOCK, HEADS), and its number."""
    number = tl.load(order + place, mask=place < entries, other=0)
    head = (number % kv_heads).to(tl.int32)
    return (head[:, None] == tl.arange(0, HEADS)[None, :]) & (place < entries)[:, None], number


@triton.jit
def _sums(flags):
    return tl.sum(flags.to(tl.int32), 0)


@triton.jit
def _drop(
    ordered,  # (batch, entries), ascending scores
    order,  # (batch, entries), column * kv_heads + head
    totals,  # (batch,)
    is_lost,  # out: (batch, kv_heads, columns)
    counts,  # out: (batch, kv_heads), entries that are left
    columns,
    kv_heads,
    SAFEGUARD: tl.constexpr,
    BLENDS: tl.constexpr,
    HEADS: tl.constexpr,  # a power of 2, at least kv_heads
    BLOCK: tl.constexpr,
):
    row, entries = tl.program_id(0).to(tl.int64), columns * kv_heads
    ordered, order, is_lost = ordered + row * entries, order + row * entries, is_lost + row * entries
    total, head = tl.load(totals + row), tl.arange(0, HEADS)
    is_head = head < kv_heads
    best = tl.zeros((HEADS,), tl.int32)
    protected, real = best, best
    for at in range(0, entries, BLOCK):
        place = at + tl.arange(0, BLOCK)
        is_of, _ = _flags(order, place, entries, kv_heads, HEADS)
        score = tl.load(ordered + place, mask=place < entries, other=0.0)
        best += _sums(is_of & (place >= entries - total)[:, None])
        protected += _sums(is_of & (score >= STAYS)[:, None])
        real += _sums(is_of & (score > float("-inf"))[:, None])

    if BLENDS:  # in the dtypes of `blended_shares`
        rest = total - tl.sum(protected, 0)
        even = tl.math.div_rn(tl.full((), SAFEGUARD, tl.float32) * rest.to(tl.float32), (kv_heads * 1.0).to(tl.float32))
        ranked = tl.full((), 1 - SAFEGUARD, tl.float64) * (best - protected).to(tl.float64)
        quota = ranked + even.to(tl.float64)
        share = tl.where(is_head, tl.floor(quota + tl.full((), 1e-9, tl.float64)), 0.0)
        remainder = tl.where(is_head, quota - share, -1.0)
        is_more = remainder[None, :] > remainder[:, None]
        is_first = (remainder[None, :] == remainder[:, None]) & (head[None, :] < head[:, None])
        by_remainder = tl.sum((is_more | is_first).to(tl.int32), 1)
        share += (by_remainder < rest - tl.sum(share, 0)).to(tl.float64)
        share = tl.minimum(share, (real - protected).to(tl.float64))
        guaranteed = tl.where(rest >= 0, protected + share.to(tl.int32), 0)
    else:
        share = tl.full((), SAFEGUARD, tl.float32) * (total // kv_heads).to(tl.float32)
        guaranteed = tl.minimum(share.to(tl.int32), real)

    seen = tl.zeros((HEADS,), tl.int32)
    left, dropped = seen + columns, total * 0
    for at in range(0, entries, BLOCK):
        place = at + tl.arange(0, BLOCK)
        is_of, number = _flags(order, place, entries, kv_heads, HEADS)
        of_head = seen[None, :] + tl.cumsum(is_of.to(tl.int32), 0)
        is_unsure = tl.sum((is_of & (of_head <= (columns - guaranteed)[None, :])).to(tl.int32), 1)
        lost = (is_unsure > 0) & (dropped + tl.cumsum(is_unsure, 0) <= entries - total)
        to = number % kv_heads * columns + number // kv_heads
        tl.store(is_lost + to, lost.to(tl.int8), mask=place < entries)
        seen += _sums(is_of)
        left -= _sums(is_of & lost[:, None])
        dropped += tl.sum(is_unsure, 0)
    tl.store(counts + row * kv_heads + head, left.to(tl.int64), mask=is_head)


@triton.jit
def _list(
    is_lost,  # (heads, columns)
    counts,  # (heads,)
    kept,  # out: (heads, most), ascending columns, aligned to the right, -1 before
    columns,
    most,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    is_lost, kept = is_lost + head * columns, kept + head * most
    first = most - tl.load(counts + head)
    for at in range(0, first, BLOCK):
        slot = at + tl.arange(0, BLOCK)
        tl.store(kept + slot, tl.full((BLOCK,), -1, tl.int64), mask=slot < first)
    for at in range(0, columns, BLOCK):
        column = at + tl.arange(0, BLOCK)
        is_kept = tl.load(is_lost + column, mask=column < columns, other=1) == 0
        slot = first + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(kept + slot, column.to(tl.int64), mask=is_kept)
        first += tl.sum(is_kept.to(tl.int32), 0)
