"""Attention of one new token over ragged segments, read where they lie.

Everywhere: query (batch, heads, 1, head_dim); keys and values flat (rows, head_dim), where KV head h of batch row b is
the segment of `lengths[b, h]` (at least 1) rows from `starts[b, h]` on; the result (batch, heads, 1, head_dim).
Between segments lie spare rows, which nobody may read: they are not initialised.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention


def ragged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    sizes: Callable[[], list[int]],
    scaling: float,
) -> torch.Tensor:
    """The fastest way of the query's device: one call per segment on a CPU, where it was measured to win
    (benchmarks/results/ragged_decode.md); on CUDA our Triton kernel, and elsewhere a gather, which was not yet
    measured.

    Args:
        starts, lengths: LongTensors (batch, kv_heads).
        longest: at least as many rows as the longest segment has.
        sizes: asked on a CPU: rows of the flat buffer, used and spare in turn, one pair per segment.
    """
    if query.device.type == "cpu":
        return decode_by_segment(query, keys, values, sizes(), scaling)
    if query.device.type == "cuda" and has_triton():
        from .ragged_decode_triton import ragged_decode_triton

        return ragged_decode_triton(query, keys, values, starts, lengths, longest, scaling)
    return decode_gathered(query, keys, values, starts, lengths, longest, scaling)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def ragged_decode_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """What all of them compute, in plain torch with an fp32 softmax."""
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
    """One attention call per segment, with the query heads of its KV head as queries; `sizes` as `ragged_decode` asks.
    Copies nothing."""
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
    """One attention call under a mask, over a copy that is padded to the longest segment."""
    slots = torch.arange(longest, device=query.device)
    used = slots < lengths[..., None]
    rows = starts[..., None] + slots.where(used, 0)
    packed = query.reshape(*starts.shape, -1, query.shape[3])  # (batch, kv_heads, groups, head_dim)
    output = scaled_dot_product_attention(packed, keys[rows], values[rows], attn_mask=used[:, :, None], scale=scaling)
    return output.reshape(*query.shape[:3], values.shape[1])
