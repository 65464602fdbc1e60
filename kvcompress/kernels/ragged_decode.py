"""Attention of one new token over ragged segments, without copying them.

Throughout, `query` is (batch, heads, 1, head_dim). Keys and values are flat, (rows, head_dim), where KV head h of batch
row b is the segment of `lengths[b, h]` (at least 1) rows from `starts[b, h]` on. The result is (batch, heads, 1,
head_dim). Spare rows between segments are uninitialised and must not be read."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..device import runs_triton


def ragged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    sizes: Callable[[], list[int]],
    scaling: float,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    appended: int = 0,
) -> torch.Tensor:
    """Attend by the best way on the query's device.

    On a CPU this is one call per segment, measured to be the fastest (benchmarks/results/ragged_decode.md), on CUDA the
    Triton kernel, and elsewhere a gather, which has not been measured yet.

    Args:
        starts, lengths: LongTensors (batch, kv_heads).
        longest: at least the length of the longest segment.
        sizes: called on a CPU: rows of the flat buffer, used and spare in turn, one pair per segment.
        new: a token's keys and values, (batch, kv_heads, 1, head_dim), to write as the last entry of each segment; only
            on CUDA with Triton.
        appended: entries of every segment behind its `lengths`, the new token included.
    """
    if query.device.type == "cpu":
        return decode_by_segment(query, keys, values, sizes(), scaling)
    if runs_triton(query.device):
        from .ragged_decode_triton import ragged_decode_triton

        return ragged_decode_triton(query, keys, values, starts, lengths, longest, scaling, new=new, appended=appended)
    return decode_gathered(query, keys, values, starts, lengths + appended, longest, scaling)


def ragged_decode_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The reference in plain PyTorch, with an fp32 softmax."""
    batch, kv_heads = starts.shape
    groups = query.shape[1] // kv_heads
    output = query.new_empty(batch, query.shape[1], 1, values.shape[1])
    for row in range(batch):
        for head in range(query.shape[1]):
            start, length = int(starts[row, head // groups]), int(lengths[row, head // groups])
            logits = keys[start : start + length].float() @ query[row, head, 0].float() * scaling
            output[row, head, 0] = (logits.softmax(0) @ values[start : start + length].float()).to(query.dtype)
    return output


def decode_by_segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sizes: list[int], scaling: float
) -> torch.Tensor:
    """Attend with one call per segment, in which the query heads of its KV head are the queries. Copies nothing.

    `sizes` are as in `ragged_decode`."""
    packed = query.reshape(1, len(sizes) // 2, -1, query.shape[3])  # (1, segments, groups, head_dim)
    segments = zip(
        packed.split(1, dim=1),
        keys[None, None].split(sizes, dim=2)[::2],
        values[None, None].split(sizes, dim=2)[::2],
        strict=True,
    )
    parts = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in segments]
    return torch.cat(parts, dim=1).view(*query.shape[:3], values.shape[1])


def decode_gathered(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scaling: float,
) -> torch.Tensor:
    """Attend with one masked call over a copy that is padded to the longest segment."""
    slots = torch.arange(longest, device=query.device)
    used = slots < lengths[..., None]
    rows = starts[..., None] + slots.where(used, 0)
    packed = query.reshape(*starts.shape, -1, query.shape[3])  # (batch, kv_heads, groups, head_dim)
    output = scaled_dot_product_attention(packed, keys[rows], values[rows], attn_mask=used[:, :, None], scale=scaling)
    return output.reshape(*query.shape[:3], values.shape[1])
