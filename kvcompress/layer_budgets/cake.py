"""Layers whose attention is spread and changes keep more. https://arxiv.org/abs/2503.12491"""

import torch

from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget

WINDOW = 32  # queries that observe, for a method without a window of its own


@register_layer_budget("cake")
class CAKELayerBudget(LayerBudget):
    """In proportion to entropy^(1/tau1) * variance^(1/tau2) of the window's attention, the variance over the window's
    queries (CAKE, section 4, layer preferences; the method's `tau1` and `tau2`, else 1), besides the window itself,
    which every layer keeps. What a layer that keeps the whole prompt cannot take goes to the others in equal parts."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        window = min(observers(view), keys.shape[2])
        weights = view.window_attention(queries, keys, window)[..., :-window]
        entropy = -(weights * (weights + 1e-10).log()).sum((1, 2, 3, 4))
        if window == 1 or not weights.shape[-1]:
            return torch.zeros_like(entropy)
        variance = weights.var(3).sum((1, 2, 3))
        tau1, tau2 = (getattr(view.settings.cluster, name, 1.0) for name in ("tau1", "tau2"))
        return entropy.clamp(min=0) ** (1 / tau1) * variance ** (1 / tau2)

    def budgets(self, view: LayerView, measured: torch.Tensor | None = None) -> list[list[int]]:
        rows = []
        for row, (budget, length) in enumerate(zip(view.budgets, view.lengths, strict=True)):
            window = min(observers(view), budget)
            total = (budget - window) * view.num_layers
            shares = shared_out(measured[:, row].tolist(), total, most=length - window)
            rows.append([window + share for share in shares])
        return [list(layer) for layer in zip(*rows, strict=True)]


def observers(view: LayerView) -> int:
    """Queries in the window; of one alone there is no variance."""
    return view.settings.query_window if view.settings.query_window > 1 else WINDOW


def shared_out(weights: list[float], total: int, most: int) -> list[int]:
    """Integers in proportion to the weights, each at most `most`, that sum to `total`, as `adjust_budgets` of CAKE's
    code (cake/utils.py) makes them: rounded down; first what is too much for a layer, then what rounding left over is
    spread evenly over the layers that have room, the earlier ones getting the odd entries. (There a layer that is
    filled in this way loses what it cannot take; here that is spread again.)"""
    whole = sum(weights)
    parts = [int(weight / whole * total) if whole else 0 for weight in weights]
    excess = sum(max(part - most, 0) for part in parts)
    parts = _spread([min(part, most) for part in parts], excess, most)
    while sum(parts) < total:
        parts = _spread(parts, total - sum(parts), most)
        parts = [min(part, most) for part in parts]
    return parts


def _spread(parts: list[int], more: int, most: int) -> list[int]:
    room = [layer for layer, part in enumerate(parts) if part < most]
    for place, layer in enumerate(room):
        parts[layer] += more // len(room) + (place < more % len(room))
    return parts
