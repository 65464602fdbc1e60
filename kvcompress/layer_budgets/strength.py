"""Layers that look at the image, and at few places of it, keep more of it. https://arxiv.org/abs/2503.23956"""

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from ..scoring.vision import elite_attention
from .base import LayerBudget, register_layer_budget

ALPHA = 0.9  # of the largest attention, where the method has no `alpha`
LEAST_SKEWNESS = 1e-3  # below it is rounding: two tokens have none


@register_layer_budget("strength")
class StrengthLayerBudget(LayerBudget):
    """What text leaves of the budget, by strength and skewness of the vision tokens' importance (AirCache):
    half by its sum, half by the third standardised moment, none where that is negative. Importance is the elite
    queries' attention, mean over the heads (the method's `alpha`, else 0.9, says who is elite).

    Text has its place in every layer. A row without vision, or whose text alone fills the budget, shares evenly.
    """

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """(batch, 3): strength, skewness, tokens of text that could be evicted."""
        lengths = on_device(view.lengths, keys.device)
        if view.vision is None:
            return torch.stack([torch.zeros_like(lengths), torch.zeros_like(lengths), lengths], 1).float()
        alpha = getattr(view.settings.cluster, "alpha", ALPHA)
        importance = elite_attention(queries, keys, view, alpha).mean(1)
        vision = view.vision
        count = vision.sum(1)
        strength = (importance * vision).sum(1)
        apart = (importance - (strength / count.clamp(min=1))[:, None]) * vision
        apart = apart / apart.abs().amax(1, keepdim=True).clamp(min=torch.finfo(apart.dtype).tiny)
        second, third = (apart.pow(power).sum(1) / count.clamp(min=1) for power in (2, 3))
        skewness = torch.where(second > 0, third / second.pow(1.5), 0.0)
        skewness = torch.where(skewness > LEAST_SKEWNESS, skewness, 0.0)
        text = torch.zeros_like(count) if view.protected is not None else lengths - count
        return torch.stack([strength, skewness, text], 1)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        layers, text = len(measured), float(measured[0, 2])
        of_vision = layers * (budget - text)
        if of_vision <= 0:
            return [1.0] * layers
        sums = measured[:, :2].double().sum(0)
        parts = torch.where(sums > 0, measured[:, :2].double() / sums.clamp(min=1e-300), 1 / layers)
        return (text + of_vision * parts.mean(1)).tolist()
