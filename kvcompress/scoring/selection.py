"""Selecting columns by their scores.

Kept columns are LongTensors (batch, kv_heads, most), ascending along the last dimension. A row or head that keeps fewer
starts with -1, which aligns its entries to the right."""

import torch

from ..device import on_device
from .windows import pad_columns

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
        scores = scores.masked_fill(pad_columns(padding, columns), float("-inf"))
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :most]
    kept = columns - 1 - order
    if min(budgets) < most:
        rank = torch.arange(most, device=scores.device)
        over = rank >= on_device(budgets, scores.device)[:, None]
        kept = kept.masked_fill(over[:, None], -1)
    if padding is not None:
        kept = kept.masked_fill(kept < padding[..., None], -1)
    return kept.sort(-1).values


def sinks_first(scores: torch.Tensor, sinks: int, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Order the entries that must stay, for budgets without room for all of them.

    Takes and returns scores (batch, kv_heads, keys) in fp32. The last token comes first, then each row's first `sinks`
    tokens in their order, then the others, the most recent first."""
    columns, most = scores.shape[-1], torch.finfo(scores.dtype).max
    position = torch.arange(columns, device=scores.device)
    if padding is not None:
        position = position - padding[..., None]
    rank = (position + 1).clamp(max=sinks + 1)
    rank[..., -1] = 0
    return torch.where(scores >= most, most * (1 - rank * STEP), scores)


def ranks(scores: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rank of each column in its KV head, 0 for the highest score; ties are as in `top_indices`."""
    if padding is not None:
        scores = scores.masked_fill(pad_columns(padding, scores.shape[-1]), float("-inf"))
    return scores.flip(-1).argsort(dim=-1, descending=True, stable=True).argsort(-1).flip(-1)


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
    columns = scores.shape[-1]
    if padding is not None:
        scores = scores.masked_fill(pad_columns(padding, columns), float("-inf"))
    totals = [round(budget * scores.shape[1]) for budget in budgets]
    total = on_device(totals, scores.device)[:, None]
    sure = ADAPTIVE[head_budget](scores, total, safeguard)
    scores = scores.masked_fill(ranks(scores) < sure[..., None], float("inf"))
    chosen = _ranks_of_all(scores) < total[..., None]
    # How many entries the longest head keeps; on CUDA, where asking would wait, the most that it can keep.
    most = min(max(totals), columns) if scores.device.type == "cuda" else int(chosen.sum(-1).max())
    kept = torch.where(chosen, torch.arange(columns, device=scores.device), -1)
    return kept.sort(-1).values[..., -most:]


def blended_shares(scores: torch.Tensor, total: torch.Tensor, safeguard: float) -> torch.Tensor:
    """Return how many entries each head keeps, LongTensor (batch, kv_heads), given the `total` (batch, 1) of all heads.

    As in AdaKV (https://arxiv.org/abs/2407.11550, algorithm 1; `AdaptiveSnapKVCluster` in its code), entries that must
    stay, such as an observation window, always stay. Of the rest, `safeguard` is shared out evenly and the other part
    as the ranking of all heads decides; left-over entries go to the heads with the largest fractions.
    """
    must = scores >= torch.finfo(scores.dtype).max / 2
    protected = must.sum(-1)
    rest = total - protected.sum(-1, keepdim=True)
    free = scores.masked_fill(must, float("-inf"))
    highest = (_ranks_of_all(free) < rest[..., None]).sum(-1)
    quota = (1 - safeguard) * highest.double() + safeguard * rest / scores.shape[1]
    share = (quota + 1e-9).floor()
    over = rest - share.sum(-1, keepdim=True)
    by_remainder = (quota - share).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    available = (free > float("-inf")).sum(-1)
    share = (share + (by_remainder < over)).long().minimum(available)
    return torch.where(rest >= 0, protected + share, 0)  # no room for all that must stay: the most recent stay


def safe_shares(scores: torch.Tensor, total: torch.Tensor, safeguard: float) -> torch.Tensor:
    """Return `blended_shares` in kvpress's form: each head is guaranteed only `safeguard` of its even share.

    Entries that must stay are part of it."""
    return (safeguard * (total // scores.shape[1])).long().expand(scores.shape[:2])


ADAPTIVE = {"adaptive": blended_shares, "adaptive-kvpress": safe_shares}


def _ranks_of_all(scores: torch.Tensor) -> torch.Tensor:
    """Return the rank of each column over all heads of its row, 0 for the highest score, in the shape of the scores.

    Among equal scores the most recent column comes first, and within a column the last head."""
    batch, kv_heads, columns = scores.shape
    by_age = scores.transpose(1, 2).flatten(1).flip(1)  # (batch, keys * kv_heads), most recent columns first
    rank = by_age.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return rank.flip(1).view(batch, columns, kv_heads).transpose(1, 2)
