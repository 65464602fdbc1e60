"""Selecting columns by their scores.

Kept columns are LongTensors (batch, kv_heads, most), ascending along the last dimension. A row or head that keeps fewer
starts with -1, which aligns its entries to the right."""

import torch

from ..device import on_device, runs_triton
from .windows import pad_columns

MANY = 4096  # entries, from which a launch more costs less than it saves
STEP = 2.0**-23  # relative spacing of the largest fp32 numbers


def top_indices(scores: torch.Tensor, budgets: list[int], padding: torch.Tensor | None = None) -> torch.Tensor:
    """Return the columns of each KV head's highest scores.

    Among equal scores (such as protected columns, which are +inf) the most recent wins, so the selection depends
    neither on the batch nor on the device's top-k.

    Args:
        scores: (batch, kv_heads, keys).
        budgets: entries to keep per KV head, one number per row.
        padding: as in scoring/windows.py; pads are never selected.
    """
    columns, most = scores.shape[-1], max(budgets)
    if padding is not None:
        scores = _without_pads(scores, padding)
    kept = scores.argsort(dim=-1, stable=True)[..., max(columns - most, 0) :]  # the best last, of equals the latest
    if min(budgets) < most:
        place = torch.arange(most, 0, -1, device=scores.device)
        over = place > on_device(budgets, scores.device)[:, None]
        kept = kept.masked_fill_(over[:, None], -1)
    if padding is not None:
        kept = kept.masked_fill_(kept < padding[..., None], -1)
    return ascending(kept)


def ascending(columns: torch.Tensor) -> torch.Tensor:
    """Sort columns along the last dimension; many in 32 bits, which takes a device half as long as in 64."""
    return columns.sort(-1).values if columns.shape[-1] <= MANY else columns.int().sort(-1).values.long()


def counted(flags: torch.Tensor) -> torch.Tensor:
    """Return how many flags are set up to each place of the last dimension; of many, over all rows at once, because a
    device adds up few long rows slowly."""
    if flags.shape[-1] <= MANY:
        return flags.cumsum(-1, dtype=torch.int32)
    so_far = flags.flatten().cumsum(0, dtype=torch.int32).view(flags.shape)
    return so_far - so_far[..., :1] + flags[..., :1].int()


def sinks_first(scores: torch.Tensor, sinks: int, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Order the entries that must stay, for budgets without room for all of them.

    Takes and returns scores (batch, kv_heads, keys) in fp32. The last token comes first, then each row's first `sinks`
    tokens in their order, then the others, the most recent first."""
    columns, most = scores.shape[-1], torch.finfo(scores.dtype).max
    rank = torch.arange(1, columns + 1, dtype=torch.float32, device=scores.device)
    if padding is not None:
        rank = rank - padding[..., None]
    rank.clamp_(max=sinks + 1)
    rank[..., -1:] = 0  # a slice: torch 2.11 waits for the device to set one number
    return torch.where(scores >= most, rank.mul_(-most * STEP).add_(most), scores)


def ranks(scores: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rank of each column in its KV head, 0 for the highest score; ties are as in `top_indices`."""
    if padding is not None:
        scores = _without_pads(scores, padding)
    return _places(_best_first(scores))


def fair_scores(
    scores: torch.Tensor, groups: torch.Tensor, count: int, budgets: list[int], padding: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scores by which each group of columns keeps the same share of what may be evicted (`fair=`,
    https://arxiv.org/abs/2510.00231, section 5.2): 1 for its best, 0 for its others.

    Columns that must stay keep their scores. What they leave of the budget is divided in proportion to the groups'
    other columns; entries that are left over go to the largest remainders, of equal ones to the first.

    Args:
        scores: (batch, kv_heads, keys), as `KVCluster.final_scores` returns them.
        groups: LongTensor (batch, keys), the group of each column, less than `count`.
        budgets, padding: as in `top_indices`.
    """
    pads = torch.zeros_like(scores, dtype=torch.bool) if padding is None else pad_columns(padding, scores.shape[-1])
    scores = scores.masked_fill(pads, -torch.inf)
    stays = scores >= torch.finfo(scores.dtype).max / 2
    evictable = ~(stays | pads)
    order = _best_first(scores)
    group = groups[:, None].expand_as(order).gather(2, order)
    is_of = group[..., None] == torch.arange(count, device=scores.device)  # (batch, kv_heads, columns, groups)
    place = (is_of & evictable.gather(2, order)[..., None]).cumsum(2)  # from 1 on, in the group
    sizes = place[:, :, -1]
    total = sizes.sum(-1, keepdim=True)
    room = (on_device(budgets, scores.device)[:, None] - stays.sum(-1)).clamp(min=0)[..., None].minimum(total)
    shares, rest = room * sizes // total.clamp(min=1), room * sizes % total.clamp(min=1)
    by_remainder = _places(rest.argsort(dim=-1, descending=True, stable=True))
    shares = shares + (by_remainder < room - shares.sum(-1, keepdim=True))
    chosen = place.gather(3, group[..., None])[..., 0] <= shares.gather(2, group)
    fair = torch.zeros_like(scores).scatter_(2, order, chosen.to(scores.dtype))
    return torch.where(stays, scores, fair)


def adaptive_indices(
    scores: torch.Tensor,
    budgets: list[float],
    safeguard: float,
    padding: torch.Tensor | None = None,
    head_budget: str = "adaptive",
) -> torch.Tensor:
    """Return the columns of the highest scores over all KV heads of a row: heads with more high scores keep more.

    Each row keeps `budget * kv_heads` entries in total. `head_budget` (a name in `ADAPTIVE`) says how many of its best
    entries each head is guaranteed, and `safeguard` how much of that is shared evenly. The ranking of all heads decides
    on the rest. Among equal scores the most recent column wins.

    Arguments are as in `top_indices`. On CUDA the result has as many slots as one head could keep.
    """
    _, kv_heads, columns = scores.shape
    if padding is not None:
        scores = _without_pads(scores, padding)
    totals = [round(budget * kv_heads) for budget in budgets]
    total = on_device(totals, scores.device)[:, None]
    if runs_triton(scores.device):
        from ..kernels.adaptive_triton import MOST_ENTRIES, adaptive_triton

        if kv_heads * columns <= MOST_ENTRIES:
            most, blends = min(max(totals), columns), head_budget == "adaptive"
            return adaptive_triton(scores, total[:, 0], most, safeguard, blends)
    # All heads' entries, the best last: (batch, entries). Of equals the latest comes last, of a column the last head.
    order = scores.transpose(1, 2).flatten(1).argsort(dim=1, stable=True)
    entries, head = order.shape[1], order % kv_heads
    is_of = head[:, None] == torch.arange(kv_heads, device=scores.device)[:, None]  # (batch, kv_heads, entries)
    if len(set(totals)) == 1:
        best = is_of[..., max(entries - totals[0], 0) :]
    else:
        best = is_of & (torch.arange(entries, 0, -1, device=scores.device) <= total)[:, None]
    unsure = columns - ADAPTIVE[head_budget](scores, best.sum(-1), total, safeguard)
    is_unsure = counted(is_of).gather(1, head[:, None])[:, 0] <= unsure.gather(1, head)
    lost = is_unsure & (is_unsure.cumsum(1) <= entries - total)
    lost = torch.empty_like(lost).scatter_(1, order, lost).view(-1, columns, kv_heads).transpose(1, 2)
    # How many entries the longest head keeps; on CUDA, where asking would wait, the most that it can keep.
    most = min(max(totals), columns) if scores.device.type == "cuda" else columns - int(lost.sum(-1).min())
    kept = torch.arange(columns, device=scores.device).expand(lost.shape).masked_fill(lost, -1)
    return ascending(kept)[..., columns - most :]


def blended_shares(scores: torch.Tensor, best: torch.Tensor, total: torch.Tensor, safeguard: float) -> torch.Tensor:
    """Return how many entries each head is guaranteed, whole numbers (batch, kv_heads).

    Args:
        best: how many of the `total` best entries of all heads are its own, (batch, kv_heads).
        total: entries of all heads together, (batch, 1).

    As in AdaKV (https://arxiv.org/abs/2407.11550, algorithm 1; `AdaptiveSnapKVCluster` in its code), entries that must
    stay, such as an observation window, always stay. Of the rest, `safeguard` is shared out evenly and the other part
    as the ranking of all heads decides; left-over entries go to the heads with the largest fractions.
    """
    protected = (scores >= torch.finfo(scores.dtype).max / 2).sum(-1)
    rest = total - protected.sum(-1, keepdim=True)
    quota = (1 - safeguard) * (best - protected).double() + safeguard * rest.float() / scores.shape[1]
    share = (quota + 1e-9).floor()
    over = rest - share.sum(-1, keepdim=True)
    by_remainder = _places((quota - share).argsort(dim=-1, descending=True, stable=True))
    share = (share + (by_remainder < over)).minimum(_real(scores) - protected)
    return (protected + share) * (rest >= 0)  # no room for all that must stay: the most recent stay


def safe_shares(scores: torch.Tensor, best: torch.Tensor, total: torch.Tensor, safeguard: float) -> torch.Tensor:
    """Return `blended_shares` in kvpress's form: each head is guaranteed only `safeguard` of its even share, which
    includes the entries that must stay."""
    return (safeguard * (total // scores.shape[1]).float()).long().minimum(_real(scores))


ADAPTIVE = {"adaptive": blended_shares, "adaptive-kvpress": safe_shares}


def _without_pads(scores: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(pad_columns(padding, scores.shape[-1]), float("-inf"))


def _real(scores: torch.Tensor) -> torch.Tensor:
    """Return how many entries of each head may be kept: LongTensor (batch, kv_heads)."""
    return (scores > float("-inf")).sum(-1)


def _best_first(scores: torch.Tensor) -> torch.Tensor:
    """Return the columns by their scores, ties as in `top_indices`."""
    return scores.argsort(dim=-1, stable=True).flip(-1)


def _places(order: torch.Tensor) -> torch.Tensor:
    """Return the place of each entry in an order, along the last dimension."""
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
