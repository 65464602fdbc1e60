"""PrefixKV: every layer keeps the same part of its scores. https://arxiv.org/abs/2412.03409"""

from typing import ClassVar

import torch

from ..scoring.budget import allocate, allocated
from ..scoring.layer_view import LayerView
from ..scoring.windows import pad_columns
from .base import LayerBudget, register_layer_budget

PROTECTED = 5  # start tokens and the last one, kept on top of the prefix as in the paper's code


@register_layer_budget("prefix")
class PrefixLayerBudget(LayerBudget):
    """Keeps, in every layer, the prefix of its ranking that holds the same part `p` of its scores (PrefixKV).

    `p` is found by bisection so that the prefixes fill the budget. The rule works with any method's scores, averaged
    over the heads: protected entries count as much as the best, and if there are negative scores, all are raised by the
    lowest.
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

    def weights(self, measured: torch.Tensor, budget: float, length: int) -> list[float]:
        scores = measured[:, ~measured.isnan().all(0)].double()
        ranked = torch.stack([_cumulated(layer) for layer in scores.nan_to_num(0.0, torch.inf)])
        ranked[scores.isnan().any(1)] = 1.0  # a layer whose states are not finite keeps the least

        def kept(part: float) -> torch.Tensor:
            return ((ranked < part).sum(1) + 1 + PROTECTED).clamp(max=length)

        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if kept(middle).sum() > budget * len(ranked) else (middle, high)
        return kept(low).tolist()

    def sizes(self, scores: torch.Tensor, ratios: int) -> torch.Tensor:
        """Return the parts of a prompt that its layers keep at the ratios 1 / `ratios`, 2 / `ratios`, ..., 1.

        `scores` (layers, keys) are averaged over heads. The result is (layers, ratios) in float64."""
        layers, length = scores.shape
        kept = []
        for entries in (length * (step + 1) / ratios for step in range(ratios)):
            weights = self.weights(scores, entries, length)
            kept.append(allocate(weights, round(entries * layers), most=length))
        return torch.tensor(kept, dtype=torch.float64).T / length


class KnownPrefixLayerBudget(LayerBudget):
    """Layer sizes from a calibration on other prompts.

    Args:
        sizes: (layers, ratios), the part of a prompt that each layer keeps at evenly spaced ratios, the last of which
            is 1. Sizes in between, and between 0 and the first, are interpolated.
    """

    def __init__(self, sizes: torch.Tensor):
        self.sizes = torch.nn.functional.pad(sizes.double().clamp(0, 1), (1, 0))

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        steps = self.sizes.shape[1] - 1
        place = budget / length * steps
        step = min(int(place), steps - 1)
        parts = torch.lerp(self.sizes[:, step], self.sizes[:, step + 1], place - step)
        return list(allocated(tuple(parts.tolist()), budget * num_layers, length))


def _cumulated(scores: torch.Tensor) -> torch.Tensor:
    """Return the cumulative fraction of the scores' sum, from the highest score to the lowest."""
    if not len(scores):
        return scores
    best = scores[scores.isfinite()].max() if scores.isfinite().any() else scores.new_tensor(1.0)
    scores = scores.clamp(max=best)
    scores = scores - scores.min().clamp(max=0)
    return scores.sort(descending=True).values.cumsum(0) / scores.sum().clamp(min=torch.finfo(scores.dtype).tiny)
