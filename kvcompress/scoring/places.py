"""Keys re-rotated to their position in the cache, so that evicted tokens leave no gaps."""

from dataclasses import replace

import torch

from .layer_view import Kept, LayerView


def moved_together(kept: Kept, view: LayerView) -> Kept:
    """Re-rotate the keys of `kept` so that every kept token directly precedes the next one, kept or still to come.

    As in StreamingLLM (https://arxiv.org/abs/2309.17453, section 3.2; mit-han-lab/streaming-llm,
    pos_shift/modify_llama.py), which rotates every key at each step to its index in the cache. Attention depends only
    on differences of positions, so here new tokens have their true positions, and so do kept tokens with no evicted
    token after them. Tokens before a gap move up to its end when entries are evicted. For StreamingLLM these are only
    the sinks, so nothing else is written. Keys are moved from their original position, `noted`, not from where they
    were last moved to, so rounding errors do not add up.

    Under M-RoPE a token moves equally far on each axis, so that its largest position is one below the smallest of the
    next token.
    """
    columns, used = kept.indices, kept.indices >= 0
    if view.stored is not None:
        columns = view.stored.columns.gather(2, columns.clamp(min=0))
    # The last kept token is followed by a text token: the next one that the model gets.
    seen = view.stored.seen if view.stored else view.rotary.positions.shape[1] - view.settings.feeds_last_again
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
        before = kept.indices[..., :some] - pads  # the index of each among the stored entries
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
