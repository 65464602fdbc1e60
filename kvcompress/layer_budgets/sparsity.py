"""VL-Cache: layers with dense attention keep more. https://arxiv.org/abs/2410.23317"""

import torch

from ..scoring.layer_view import LayerView
from ..scoring.vision import observer_counts, observer_queries
from .base import LayerBudget, register_layer_budget

THRESHOLD = 0.01  # part of a row's maximum below which a weight counts as zero (section 4.1)


@register_layer_budget("sparsity")
class SparsityLayerBudget(LayerBudget):
    """Shares in proportion to the density of a layer's attention (VL-Cache, section 4.1).

    Density is the fraction of visible weights that reach a hundredth of their row's largest, over the queries after the
    last image, averaged over the heads."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        asking, first = observer_queries(view, keys), keys.shape[2] - max(observer_counts(view))
        dense = torch.zeros(keys.shape[0], dtype=torch.float32, device=keys.device)
        for rows, weights in view.attention_blocks(queries, keys, first):
            above = (weights >= THRESHOLD * weights.amax(-1, keepdim=True)) & (weights > 0)
            dense += (above.sum(-1) * asking[:, None, None, rows]).sum((1, 2, 3))
        column = torch.arange(keys.shape[2], device=keys.device)
        pads = 0 if view.padding is None else view.padding[:, :1]
        visible = ((column + 1 - pads) * asking).sum(1)
        return dense / (visible * queries.shape[1])
