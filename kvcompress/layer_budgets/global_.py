"""One ranking over all layers and heads. https://arxiv.org/abs/2505.23416"""

from typing import ClassVar

import torch

from ..scoring.layer_view import LayerView
from ..scoring.windows import pad_columns
from .base import LayerBudget, register_layer_budget


@register_layer_budget("global")
class GlobalLayerBudget(LayerBudget):
    """Every layer keeps as many as it has among the highest scores of all layers (KVzip, section 3.3). With adaptive
    heads and no safeguard what is kept is the best of all layers and heads, but for the rounding of a layer's total to
    whole entries per head. Scores of different layers must mean the same: attention weights do."""

    measures_queries: ClassVar[bool] = False

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return evictable_scores(scores, view)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        layers, heads, _ = measured.shape
        return shares_of_highest(measured.flatten(1), budget * layers * heads)


def evictable_scores(scores: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Scores (batch, kv_heads, keys) in which pads and what is protected come last."""
    if view.padding is not None:
        scores = scores.masked_fill(pad_columns(view.padding, scores.shape[2]), -torch.inf)
    if view.protected is not None:
        scores = scores.masked_fill(view.protected[:, None], -torch.inf)
    return scores


def shares_of_highest(measured: torch.Tensor, wanted: int) -> list[float]:
    """How many of the `wanted` highest numbers each layer has, of (layers, numbers); equals are shared out evenly."""
    least = measured.flatten().topk(wanted).values[-1]  # of those that are kept
    above, equal = (measured > least).sum(1), (measured == least).sum(1)
    return (above + equal * (wanted - above.sum()) / equal.sum()).tolist()
