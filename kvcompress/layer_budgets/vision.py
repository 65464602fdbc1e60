"""Layers in which the question looks at the image keep more. https://arxiv.org/abs/2606.03075"""

import torch

from ..scoring.layer_view import LayerView
from ..scoring.vision import question_attention
from .base import LayerBudget, register_layer_budget


@register_layer_budget("vision")
class VisionLayerBudget(LayerBudget):
    """In proportion to the attention that the vision tokens receive from the queries behind the last image, mean over
    the heads (TGV-KV, text-vision budgeting). The paper lets what a full layer cannot take go to waste; here the other
    layers get it. A row without vision shares evenly."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        if view.vision is None:
            return torch.zeros(keys.shape[0], device=keys.device)
        return (question_attention(queries, keys, view).mean(1) * view.vision).sum(1)
