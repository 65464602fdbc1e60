"""Every layer keeps the same part of its scores. https://arxiv.org/abs/2412.03409"""

from typing import ClassVar

import torch

from ..scoring.layer_view import LayerView
from ..scoring.windows import pad_columns
from .base import LayerBudget, register_layer_budget

PROTECTED = 5  # start tokens and the last one come on top of the prefix, as in the paper's code


@register_layer_budget("prefix")
class PrefixLayerBudget(LayerBudget):
    """The prefixes of the layers' rankings that hold the same part `p` of the layer's scores (PrefixKV): `p` is
    found by bisection so that the prefixes fill the budget.

    Works on any method's scores, averaged over the heads: what a method protects counts as its best, and scores
    below zero are lifted by their least.
    """

    measures_queries: ClassVar[bool] = False

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        left_out = torch.zeros(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
        if view.padding is not None:
            left_out = pad_columns(view.padding, scores.shape[2])[:, 0]
        if view.protected is not None:
            left_out = left_out | view.protected
        return scores.mean(1).masked_fill(left_out, float("nan"))

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        ranked = torch.stack([_cumulated(layer[~layer.isnan()].double()) for layer in measured])

        def kept(part: float) -> torch.Tensor:
            return ((ranked < part).sum(1) + 1 + PROTECTED).clamp(max=length)

        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if kept(middle).sum() > budget * len(ranked) else (middle, high)
        return kept(low).tolist()


def _cumulated(scores: torch.Tensor) -> torch.Tensor:
    """The scores' part of their sum, cumulated from the highest to the lowest."""
    if not len(scores):
        return scores
    best = scores[scores.isfinite()].max() if scores.isfinite().any() else scores.new_tensor(1.0)
    scores = scores.clamp(max=best)
    scores = scores - scores.min().clamp(max=0)
    return scores.sort(descending=True).values.cumsum(0) / scores.sum().clamp(min=torch.finfo(scores.dtype).tiny)
