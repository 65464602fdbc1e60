"""KVCompose: one ranking over the composite tokens of all layers. https://arxiv.org/abs/2509.05165"""

from typing import ClassVar

import torch

from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget
from .global_ import evictable_scores, shares_of_highest


@register_layer_budget("composite")
class CompositeLayerBudget(LayerBudget):
    """Every layer keeps as many tokens as it has among the highest composite scores of all layers (KVCompose).

    Each KV head's scores are sorted, and scores of equal rank are averaged over the heads. At each rank the first layer
    counts with the highest score of any layer, so no layer keeps more than it. Scores must be comparable across layers;
    attention weights are."""

    measures_queries: ClassVar[bool] = False

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return evictable_scores(scores, view).sort(-1, descending=True).values.mean(1)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        first = measured.amax(0, keepdim=True)
        return shares_of_highest(torch.cat([first, measured[1:]]), budget * len(measured))
