"""Numbers of the same token in the KV heads of a layer, which hold different tokens once something was evicted."""

import torch

from .layer_view import LayerView


def token_columns(view: LayerView, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the column of the sequence that each entry comes from, LongTensor of the shape of `like` (batch, kv_heads,
    columns), and the number behind all of them, which unused slots have."""
    if view.stored is None:
        return torch.arange(like.shape[2], device=like.device).expand(like.shape), like.shape[2]
    return view.stored.columns % (view.stored.seen + 1), view.stored.seen  # -1 becomes the last


def over_heads(numbers: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Sum the numbers (batch, kv_heads, columns) of each token over all KV heads; a head that does not hold it counts
    with the mean of those that do. Returns (batch, 1 or kv_heads, columns)."""
    if view.stored is None:
        return numbers.sum(1, keepdim=True)
    columns, end = token_columns(view, numbers)
    real = view.real_columns(numbers).expand_as(numbers)
    nothing = numbers.new_zeros(*numbers.shape[:2], end + 1)
    total = nothing.scatter(2, columns, torch.where(real, numbers, 0.0)).sum(1)
    holding = nothing.scatter(2, columns, real.to(numbers.dtype)).sum(1).clamp(min=1)
    of_token = total / holding * numbers.shape[1]
    return of_token[:, None].expand_as(nothing).gather(2, columns)
