"""More budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from ..scoring.budget import effivlm_window, pyramid
from .base import LayerBudget, register_layer_budget


@register_layer_budget("pyramid")
class PyramidLayerBudget(LayerBudget):
    """Every layer has the method's window; what falls linearly from the first layer to the last is the rest of the
    budget (PyramidKV, section 3.3, as in KVCache-Factory, `pyramidkv_utils.py`, `PyramidKVCluster`). Uniform where
    twice the rest exceeds the prompt. The sum is exact; there each step is rounded down, so that the layers hold up to
    (num_layers - 1) / 2 entries more in the mean."""

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        window = min(self.window(budget, window), budget)
        rest = budget - window
        if length < 2 * rest:
            return [budget] * num_layers
        return [window + part for part in pyramid(rest, length - window, num_layers, beta, least=0 if window else 1)]

    def window(self, budget: int, window: int) -> int:
        return window


@register_layer_budget("pyramid-effivlm")
class EffiVLMPyramidLayerBudget(PyramidLayerBudget):
    """The pyramid of EffiVLM-Bench: the window of every layer is a tenth of the budget, whatever the method's is."""

    def window(self, budget: int, window: int) -> int:
        return effivlm_window(budget)


@register_layer_budget("pyramid-kvpress")
class KVPressPyramidLayerBudget(LayerBudget):
    """The pyramid of kvpress (pyramidkv_press.py): the whole budget falls from layer to layer, from the prompt less the
    window at most; uniform where the budget is more than that, or the last layer would hold less than the window. The
    sum is exact; there each layer's size is rounded by itself."""

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        if budget > length - window:
            return [budget] * num_layers
        return pyramid(budget, length - window, num_layers, beta, least=max(1, window))
