"""D2O: layers with evenly spread attention keep more. https://arxiv.org/abs/2406.13035"""

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from ..scoring.windows import pad_columns
from .base import LayerBudget, register_layer_budget


@register_layer_budget("variance")
class VarianceLayerBudget(LayerBudget):
    """Shares by a softmax over the layers' negative variance of attention (D2O, dynamic layer allocation).

    It is the variance over the keys of the attention that they receive from all queries. As in the paper's code, a
    head's variance is rescaled by the smallest and the largest in its layer, and a layer's variance is the mean over
    its heads. The unscaled variance grows with the prompt, and one layer would get everything."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        columns = keys.shape[2]
        shape = keys.shape[0], queries.shape[1], columns
        received = torch.zeros(shape, dtype=torch.float32, device=keys.device)
        for rows, weights in view.attention_blocks(queries, keys):
            received[..., : rows.stop] += weights.sum(3).flatten(1, 2)
        tokens = on_device(view.lengths, keys.device)[:, None]
        apart = received - (received.sum(-1) / tokens)[..., None]
        if view.padding is not None:
            apart = apart.masked_fill(pad_columns(view.padding[:, :1], columns), 0.0)
        variance = (apart**2).sum(-1) / (tokens - 1).clamp(min=1)  # (batch, heads)
        least, largest = variance.amin(1, keepdim=True), variance.amax(1, keepdim=True)
        return ((variance - least) / (largest - least + 1e-6)).mean(1)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        return torch.softmax(-measured, 0).tolist()
