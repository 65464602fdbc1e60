"""PyramidKV: a larger budget for lower layers. https://arxiv.org/abs/2406.02069"""

from ..scoring.budget import effivlm_window, pyramid, pyramid_ends
from .base import LayerBudget, register_layer_budget


@register_layer_budget("pyramid")
class PyramidLayerBudget(LayerBudget):
    """Every layer keeps the method's window; the rest of the budget falls linearly from the first layer to the last.

    As in PyramidKV (section 3.3; KVCache-Factory, `pyramidkv_utils.py`, `PyramidKVCluster`). Budgets are uniform if
    twice the rest exceeds the prompt. The sum is exact; KVCache-Factory rounds each step down, so its layers hold up to
    (num_layers - 1) / 2 more entries on average."""

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
    """EffiVLM-Bench's pyramid: every layer's window is a tenth of the budget, whatever the method's window is."""

    def window(self, budget: int, window: int) -> int:
        return effivlm_window(budget)


@register_layer_budget("pyramid-kvpress")
class KVPressPyramidLayerBudget(LayerBudget):
    """kvpress's pyramid (pyramidkv_press.py): the whole budget falls from layer to layer.

    The first layer gets at most the prompt without the window. Budgets are uniform if the mean exceeds that, or if the
    last layer would hold less than the window. Each layer's size is rounded by itself, halves to even: a size and its
    mirror image in the pyramid sum to twice the mean, so the sum is exact all the same."""

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        if budget > length - window:
            return [budget] * num_layers
        first, last = pyramid_ends(budget, length - window, num_layers, beta, least=max(1, window))
        step = (first - last) / max(num_layers - 1, 1)
        upper = [round(first - layer * step) for layer in range((num_layers + 1) // 2)]
        return upper + [2 * budget - size for size in reversed(upper[: num_layers // 2])]
