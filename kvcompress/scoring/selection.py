"""From scores to kept columns. Kept columns are LongTensors (batch, kv_heads, most), ascending along the last
dimension; a row or head that keeps fewer starts with -1, so that its entries are aligned to the right."""

import torch

from .windows import pad_columns


def top_indices(scores: torch.Tensor, budgets: list[int], padding: torch.Tensor | None = None) -> torch.Tensor:
    """The columns of each KV head's highest scores.

    Among equal scores (as among protected columns, which are +inf) the most recent wins, so that the selection
    depends neither on the batch nor on the device's top-k.

    Args:
        scores: (batch, kv_heads, keys).
        budgets: entries to keep per KV head, one number per row.
        padding: pad columns, see scoring/windows.py; they are never selected.
    """
    columns, most = scores.shape[-1], max(budgets)
    if padding is not None:
        scores = scores.masked_fill(pad_columns(padding, columns), float("-inf"))
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :most]
    kept = columns - 1 - order
    if min(budgets) < most:
        rank = torch.arange(most, device=scores.device)
        over = rank >= torch.tensor(budgets, device=scores.device)[:, None]
        kept = kept.masked_fill(over[:, None], -1)
    if padding is not None:
        kept = kept.masked_fill(kept < padding[..., None], -1)
    return kept.sort(-1).values


def ranks(scores: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """The place of each column among its KV head's, 0 for the highest score; arguments and ties as in `top_indices`."""
    if padding is not None:
        scores = scores.masked_fill(pad_columns(padding, scores.shape[-1]), float("-inf"))
    return scores.flip(-1).argsort(dim=-1, descending=True, stable=True).argsort(-1).flip(-1)


def adaptive_indices(
    scores: torch.Tensor, budgets: list[int], safeguard: float, padding: torch.Tensor | None = None
) -> torch.Tensor:
    """The columns of the highest scores over all KV heads of a row: a head with more high scores keeps more.

    AdaKV (https://arxiv.org/abs/2407.11550, algorithm 1): each row keeps `budget * kv_heads` entries in all, and
    each head is sure of its own best `int(safeguard * budget)`. Among equal scores the most recent column wins.

    Arguments as in `top_indices`. One synchronisation with the device: the longest head's length.
    """
    batch, kv_heads, columns = scores.shape
    if padding is not None:
        scores = scores.masked_fill(pad_columns(padding, columns), float("-inf"))
    safe = [int(safeguard * budget) for budget in budgets]
    if max(safe):
        sure = top_indices(scores, safe, padding).remainder(columns + 1)  # -1 becomes a column that is cut off
        forced = torch.zeros(batch, kv_heads, columns + 1, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(forced.scatter_(-1, sure, True)[..., :columns], float("inf"))
    by_age = scores.transpose(1, 2).flatten(1).flip(1)  # (batch, keys * kv_heads), most recent columns first
    order = by_age.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    total = torch.tensor(budgets, device=scores.device)[:, None] * kv_heads
    chosen = (rank < total).flip(1).view(batch, columns, kv_heads).transpose(1, 2)
    most = int(chosen.sum(-1).max())
    kept = torch.where(chosen, torch.arange(columns, device=scores.device), -1)
    return kept.sort(-1).values[..., -most:]
