"""More budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from ..budget import pyramid
from .base import LayerBudget, register_layer_budget


@register_layer_budget("pyramid")
class PyramidLayerBudget(LayerBudget):
    """Falls linearly from the first layer to the last (PyramidKV, section 3.3); uniform where the last layer would
    hold less than the method's window."""

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        return pyramid(budget, length, num_layers, beta, least=max(1, min(window, budget)))
