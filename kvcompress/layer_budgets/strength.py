"""AirCache: layers that attend to the image, and to few places in it, keep more. https://arxiv.org/abs/2503.23956"""

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from ..scoring.vision import elite_attention
from .base import LayerBudget, register_layer_budget

ALPHA = 0.9  # part of the largest attention, if the method has no `alpha`
LEAST_SKEWNESS = 1e-3  # less is rounding: two tokens have no skewness


@register_layer_budget("strength")
class StrengthLayerBudget(LayerBudget):
    """Shares out the budget that text leaves by the strength and skewness of vision tokens' importance (AirCache).

    Half goes by the sum of importance, half by its third standardised moment, if positive. Importance is the elite
    queries' attention, averaged over the heads; the method's `alpha`, otherwise 0.9, defines the elite.

    Every layer has room for the text. The layers of a row without vision tokens, or whose text alone fills the budget,
    share evenly.
    """

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """Return (batch, 3): strength, skewness, and the number of text tokens that could be evicted."""
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
        text = view.real_columns(keys)[:, 0] & ~vision
        if view.protected is not None:
            text &= ~view.protected
        return torch.stack([strength, skewness, text.sum(1)], 1)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        layers, text = len(measured), float(measured[0, 2])
        of_vision = layers * (budget - text)
        if of_vision <= 0:
            return [1.0] * layers
        sums = measured[:, :2].double().sum(0)
        parts = torch.where(sums > 0, measured[:, :2].double() / sums.clamp(min=1e-300), 1 / layers)
        return (text + of_vision * parts.mean(1)).tolist()
