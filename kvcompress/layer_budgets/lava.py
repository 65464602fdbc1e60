"""LAVa: layers with spread scores keep more. https://arxiv.org/abs/2509.09754"""

import math
from typing import ClassVar

import torch

from ..scoring.budget import allocate
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget


@register_layer_budget("lava")
class LAVaLayerBudget(LayerBudget):
    """Shares in proportion to the normalised entropy of a layer's scores (LAVa, dynamic layer budgets).

    The scores of all heads, as fractions of their sum, form the distribution; its entropy is divided by the largest
    possible one. Every layer also keeps the window. Entries that must stay and scores below 0 do not count."""

    measures_queries: ClassVar[bool] = False

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        counted = view.real_columns(keys) & scores.isfinite()
        if view.protected is not None:
            counted = counted & ~view.protected[:, None]
        free = scores.clamp(min=0.0).masked_fill(~counted, 0.0).flatten(1)
        shares = free / free.sum(1, keepdim=True).clamp(min=torch.finfo(free.dtype).tiny)
        largest = counted.expand_as(scores).sum((1, 2)).clamp(min=2).log()
        return -torch.xlogy(shares, shares).sum(1) / largest

    def budgets(self, view: LayerView, measured: torch.Tensor | None = None) -> list[list[int]]:
        rows = []
        for row, (budget, length) in enumerate(zip(view.budgets, view.lengths, strict=True)):
            window = min(view.settings.query_window, budget)
            weights = [0.0 if math.isnan(weight) else weight for weight in measured[:, row].tolist()]
            shares = allocate(weights, (budget - window) * view.num_layers, most=length - window)
            rows.append([window + share for share in shares])
        return [list(layer) for layer in zip(*rows, strict=True)]
