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

    def of_row(self, measured: torch.Tensor, budget: int, length: int, view: LayerView) -> list[int]:
        window = min(view.settings.query_window, budget)
        weights = [0.0 if math.isnan(weight) else weight for weight in measured.tolist()]
        shares = allocate(weights, (budget - window) * view.num_layers, most=length - window)
        return [window + share for share in shares]
