"""KVzip: one ranking over all layers and heads. https://arxiv.org/abs/2505.23416"""

from typing import ClassVar

import torch

from ..scoring.budget import allocate
from ..scoring.layer_view import LayerView
from ..scoring.selection import ADAPTIVE
from ..scoring.windows import pad_columns
from .base import LayerBudget, register_layer_budget


@register_layer_budget("global")
class GlobalLayerBudget(LayerBudget):
    """Every layer keeps as many entries as it has among the highest scores of all layers (KVzip, section 3.3).

    With adaptive heads and no safeguard, exactly the best entries of all layers and heads are kept: a layer's total is
    then the sum over its heads, but at least one. Scores must be comparable across layers; attention weights are."""

    measures_queries: ClassVar[bool] = False

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return evictable_scores(scores, view)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        layers, heads, _ = measured.shape
        return shares_of_highest(measured.flatten(1), budget * layers * heads)

    def of_row(self, measured: torch.Tensor, budget: int, length: int, view: LayerView) -> list[float]:
        if not budget or view.settings.head_budget not in ADAPTIVE:
            return super().of_row(measured, budget, length, view)
        heads, weights = measured.shape[1], self.checked_weights(measured, budget, length)
        totals = allocate(weights, budget * view.num_layers * heads, most=length * heads)
        return [total / heads for total in totals]


def evictable_scores(scores: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Return the scores (batch, kv_heads, keys) with -inf at pads and protected columns."""
    if view.padding is not None:
        scores = scores.masked_fill(pad_columns(view.padding, scores.shape[2]), -torch.inf)
    if view.protected is not None:
        scores = scores.masked_fill(view.protected[:, None], -torch.inf)
    return scores


def shares_of_highest(measured: torch.Tensor, wanted: int) -> list[float]:
    """Count how many of the `wanted` highest numbers each layer of (layers, numbers) has; ties are shared evenly."""
    least = measured.flatten().topk(wanted).values[-1]  # the lowest number that is kept
    above, equal = (measured > least).sum(1), (measured == least).sum(1)
    return (above + equal * (wanted - above.sum()) / equal.sum()).tolist()
