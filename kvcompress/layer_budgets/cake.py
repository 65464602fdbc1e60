"""Layers whose attention is spread and changes keep more. https://arxiv.org/abs/2503.12491"""

import torch

from ..scoring.budget import allocate
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget

WINDOW = 32  # queries that observe, for a method without a window of its own


@register_layer_budget("cake")
class CAKELayerBudget(LayerBudget):
    """In proportion to entropy^(1/tau1) * variance^(1/tau2) of the window's attention, the variance over the window's
    queries (CAKE, section 4, layer preferences; the method's `tau1` and `tau2`, else 1), besides the window itself,
    which every layer keeps."""

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
            shares = allocate(measured[:, row].tolist(), total, most=length - window)
            rows.append([window + share for share in shares])
        return [list(layer) for layer in zip(*rows, strict=True)]


def observers(view: LayerView) -> int:
    """Queries in the window; of one alone there is no variance."""
    return view.settings.query_window if view.settings.query_window > 1 else WINDOW
