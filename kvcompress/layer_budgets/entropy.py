"""Layers whose attention is spread keep more. https://arxiv.org/abs/2502.17599"""

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget


@register_layer_budget("attention-entropy")
class AttentionEntropyLayerBudget(LayerBudget):
    """By the softmax over the layers of their attention's entropy, mean over all queries and heads (MEDA's code:
    modify_llama.py, `compute_multimodal_entropy`)."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        sums = torch.zeros(keys.shape[0], device=keys.device)
        for _, weights in view.attention_blocks(queries, keys):
            sums -= torch.xlogy(weights, weights).sum(-1).mean((1, 2)).sum(1)
        return sums / on_device(view.lengths, keys.device).clamp(min=1)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        return measured.double().softmax(0).tolist()


@register_layer_budget("entropy")
class EntropyLayerBudget(AttentionEntropyLayerBudget):
    """By the softmax over the layers of their cross-modal attention entropy (MEDA, section 3.2): the entropy of a text
    query's attention over the vision tokens, mean over text queries and heads, plus that of vision over text.

    A query only attends to what is before it (the code's function for this, which nothing calls, leaves the causal mask
    out); one that sees nothing of the other modality has no entropy. Where a row has one modality only, its layers
    share evenly.
    """

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        of_vision, of_text = torch.zeros(2, keys.shape[0], device=keys.device)
        if view.vision is None:
            return of_text
        for rows, weights in view.attention_blocks(queries, keys):
            asks = view.vision[:, rows]
            other = asks[:, :, None] != view.vision[:, None, : rows.stop]
            across = weights * other[:, None, None]
            total = across.sum(-1)
            seen = total.clamp(min=torch.finfo(total.dtype).tiny)
            entropy = torch.where(total > 0, seen.log() - torch.xlogy(across, across).sum(-1) / seen, 0.0).mean((1, 2))
            of_vision += (entropy * asks).sum(1)
            of_text += (entropy * ~asks).sum(1)
        vision_tokens = view.vision.sum(1)
        text_tokens = on_device(view.lengths, keys.device) - vision_tokens
        return of_text / text_tokens.clamp(min=1) + of_vision / vision_tokens.clamp(min=1)
