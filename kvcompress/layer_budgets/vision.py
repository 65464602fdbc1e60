"""TGV-KV: layers in which the question attends to the image keep more. https://arxiv.org/abs/2606.03075"""

import torch

from ..scoring.layer_view import LayerView
from ..scoring.vision import question_attention
from .base import LayerBudget, register_layer_budget


@register_layer_budget("vision")
class VisionLayerBudget(LayerBudget):
    """Shares in proportion to the vision tokens' attention from the queries after the last image (TGV-KV).

    Attention is averaged over the heads (text-vision budgeting). In the paper the excess of a full layer is lost; here
    the other layers get it. The layers of a row without vision tokens share evenly."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        if view.vision is None:
            return torch.zeros(keys.shape[0], dtype=torch.float32, device=keys.device)
        return (question_attention(queries, keys, view).mean(1) * view.vision).sum(1)
