"""MEDA: layers with spread attention keep more. https://arxiv.org/abs/2502.17599"""

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget


@register_layer_budget("attention-entropy")
class AttentionEntropyLayerBudget(LayerBudget):
    """Shares by a softmax over the layers' attention entropy, averaged over all queries and heads.

    As in MEDA's code (modify_llama.py, `compute_multimodal_entropy`)."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        sums = torch.zeros(keys.shape[0], dtype=torch.float32, device=keys.device)
        for _, weights in view.attention_blocks(queries, keys):
            sums -= torch.xlogy(weights, weights).sum(-1).mean((1, 2)).sum(1)
        return sums / on_device(view.lengths, keys.device).clamp(min=1)

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        return measured.double().softmax(0).tolist()


@register_layer_budget("entropy")
class EntropyLayerBudget(AttentionEntropyLayerBudget):
    """Shares by a softmax over the layers' cross-modal attention entropy (MEDA, section 3.2).

    This is the entropy of a text query's attention over the vision tokens, averaged over text queries and heads, plus
    that of vision queries over text.

    A query attends only to tokens before it (the code has a function for this entropy, which nothing calls; it leaves
    out the causal mask). A query that sees no token of the other modality has no entropy. If a row has only one
    modality, its layers share evenly.
    """

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        of_vision, of_text = torch.zeros(2, keys.shape[0], dtype=torch.float32, device=keys.device)
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
