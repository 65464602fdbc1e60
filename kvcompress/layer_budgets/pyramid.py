"""More budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from ..scoring.budget import effivlm_window, pyramid
from .base import LayerBudget, register_layer_budget


@register_layer_budget("pyramid")
class PyramidLayerBudget(LayerBudget):
    """Falls linearly from the first layer to the last (PyramidKV, section 3.3); uniform where the last layer would
    hold less than the method's window."""

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        return pyramid(budget, length, num_layers, beta, least=max(1, min(window, budget)))


@register_layer_budget("pyramid-effivlm")
class EffiVLMPyramidLayerBudget(LayerBudget):
    """The pyramid of EffiVLM-Bench: every layer has a window of a tenth of the budget, what falls from layer to layer
    is the rest; uniform where twice the rest exceeds the prompt. The sum is exact; there each step is rounded down, so
    that the layers hold up to (num_layers - 1) / 2 entries more in the mean."""

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        window = effivlm_window(budget)
        rest = budget - window
        if length < 2 * rest:
            return [budget] * num_layers
        return [window + part for part in pyramid(rest, length - window, num_layers, beta, least=0)]
