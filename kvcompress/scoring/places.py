"""Keys at their place in the cache: what was evicted between two kept tokens leaves no gap in their positions."""

from dataclasses import replace

import torch

from .layer_view import Kept, LayerView


def moved_together(kept: Kept, view: LayerView) -> Kept:
    """`kept` with its keys rotated anew, so that every kept token stands right before the one that follows it, be that
    kept or to come (StreamingLLM, https://arxiv.org/abs/2309.17453, section 3.2; mit-han-lab/streaming-llm,
    pos_shift/modify_llama.py).

    There every key is rotated at each step, to its index in the cache. Attention depends on differences of positions
    alone: here tokens to come have their true positions, as have kept ones behind which nothing was evicted, and what
    stands before a gap moves up to its end, at an eviction. Of StreamingLLM these are the sinks, so that nothing else
    is written. They are moved from where they came from, `noted`, not from where they were moved to: rounding does not
    add up.

    Under M-RoPE a token moves by as much on each axis, so that its largest position is one below the least of the next.
    """
    columns, used = kept.indices, kept.indices >= 0
    if view.stored is not None:
        columns = view.stored.columns.gather(2, columns.clamp(min=0))
    # Behind the last that is kept comes a token of text: the next that the model is given.
    seen = view.rotary.positions.shape[1] if view.stored is None else view.stored.seen
    columns = torch.nn.functional.pad(columns, (0, 1), value=seen)
    largest, least = view.rotary.positions_of(columns)
    apart = (columns[..., 1:] - columns[..., :-1] > 1) & used
    gaps = torch.where(apart, least[..., 1:] - largest[..., :-1] - 1, 0).clamp(min=0)
    by = gaps.flip(-1).cumsum(-1).flip(-1)
    behind = (by > 0).any(1).any(0).nonzero().flatten()  # the slots that move, in any row and head
    if not len(behind):
        return replace(kept, noted=None)
    some = int(behind[-1]) + 1
    keys = kept.keys[:, :, :some]
    if view.noted is not None:
        pads = 0 if view.padding is None else view.padding[..., None]
        before = kept.indices[..., :some] - pads  # the place of each among what was stored
        at = before.clamp(0, view.noted.shape[2] - 1)
        origin = view.noted.gather(2, at[..., None].expand_as(keys))
        keys = torch.where((before == at)[..., None] & origin.isfinite(), origin, keys)
    rank = used[..., :some].cumsum(-1) - 1
    unmoved = torch.full_like(keys, torch.nan)
    slots = rank.clamp(min=0)[..., None].expand_as(keys)
    moving = (used[..., :some] & (by[..., :some] > 0))[..., None]
    unmoved = unmoved.scatter_reduce(2, slots, keys.masked_fill(~moving, -torch.inf), "amax", include_self=False)
    moved = torch.where(moving, view.rotary.moved(keys, by[..., :some]), kept.keys[:, :, :some])
    noted = unmoved if view.settings.evicts_later else None
    return replace(kept, keys=torch.cat([moved, kept.keys[:, :, some:]], 2), noted=noted)
