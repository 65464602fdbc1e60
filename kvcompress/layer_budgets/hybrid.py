"""One part shared evenly, the rest by density. After VL-Cache, https://arxiv.org/abs/2410.23317"""

from typing import ClassVar

import torch

from .base import register_layer_budget
from .sparsity import SparsityLayerBudget


@register_layer_budget("hybrid")
class HybridLayerBudget(SparsityLayerBudget):
    """Shares out `even` of the budget evenly and the rest as `sparsity` does, so that no layer starves."""

    even: ClassVar[float] = 0.8

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        part = measured / measured.sum().clamp(min=torch.finfo(measured.dtype).tiny)
        return (self.even / len(part) + (1 - self.even) * part).tolist()


@register_layer_budget("sparsity-effivlm")
class EffiVLMSparsityLayerBudget(HybridLayerBudget):
    """EffiVLM-Bench's `vl-cache`: every layer gets a window of a tenth of the mean budget; density shares the rest."""

    even: ClassVar[float] = 0.1
