"""Layers that only look at the first and the last tokens keep little. https://arxiv.org/abs/2410.13846"""

import torch

from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget

QUERIES = 32  # the last of the prompt, by which a layer is judged
FIRST, LAST = 4, 1024  # tokens that a lazy layer looks at
THRESHOLD = 0.9  # of the attention, where the method has no `lazy_threshold`
SHARE = 0.25  # what a lazy layer keeps of what another one keeps


@register_layer_budget("lazy")
class LazyLayerBudget(LayerBudget):
    """A lazy layer gets a quarter of what the others get. Lazy is a layer whose last 32 queries spend more than
    the method's `lazy_threshold` of their attention on the first 4 tokens and the last 1024, in the mean over queries
    and heads (SimLayerKV, section 3). With all layers alike, all get the same."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        columns = keys.shape[2]
        weights = view.window_attention(queries, keys, QUERIES)
        rows = weights.shape[3]
        column = torch.arange(columns, device=keys.device)
        position = column if view.padding is None else column - view.padding[:, :1]
        query = column[-rows:, None]
        near = (query - column < LAST) | (position < FIRST).view(-1, 1, columns)  # (batch, queries, columns)
        spent = (weights * near[:, None, None]).sum((1, 2, 3, 4)) / queries.shape[1]
        judges = torch.tensor(view.lengths, device=keys.device).clamp(max=rows)
        threshold = getattr(view.settings.cluster, "lazy_threshold", THRESHOLD)
        return torch.where(spent / judges > threshold, SHARE, 1.0)
