"""Mostly even, a little by density. After VL-Cache, https://arxiv.org/abs/2410.23317"""

import torch

from .base import register_layer_budget
from .sparsity import SparsityLayerBudget

EVEN = 0.8  # of the budget goes to all layers alike


@register_layer_budget("hybrid")
class HybridLayerBudget(SparsityLayerBudget):
    """Four fifths of the budget evenly, one fifth as `sparsity` shares it out: no layer can starve."""

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        part = measured / measured.sum()
        return (EVEN / len(part) + (1 - EVEN) * part).tolist()
