"""Every layer keeps the same number of entries."""

from .base import LayerBudget, register_layer_budget


@register_layer_budget("uniform")
class UniformLayerBudget(LayerBudget):
    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        return [budget] * num_layers
