"""TGV-KV: vision tokens chosen by the question's words, weighted by importance. https://arxiv.org/abs/2606.03075"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import Kept, LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import observer_queries, text_first
from .base import KVCluster


@register_method("tgv-kv")
@dataclass(frozen=True)
class TGVKVCluster(KVCluster):
    """Text-guided vision eviction: keeps the vision tokens that the question attends to most, the same in all heads.

    A vision token is scored by the attention of the queries after the last image, each weighted by how much later
    queries attend to it (text-weighted ranking). Text is scored by the attention that it receives from all queries and
    is evicted last (text priority). The first `sinks` tokens and the last token stay. Layers share the budget by how
    much the question attends to vision (`layer_budget="vision"`).

    If text alone exceeds the budget, text is ranked by that sum. While decoding, the token that the last query attends
    to least is evicted. As many recent tokens are protected as tokens of the question were kept (the authors' code:
    tgv_kv.py, `initial_text_len_list`); question tokens older than that can be evicted.
    """

    sinks: NonNegativeInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2606.03075"
    whole_prompt: ClassVar[bool] = True
    mixes_heads: ClassVar[bool] = True
    layer_budget: ClassVar[str] = "vision"
    head_budget: ClassVar[str] = "shared"
    decode_interval: ClassVar[int] = 1
    query_window: ClassVar[int] = 1

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.is_decoding:
            scores = view.window_attention(queries, keys, 1)[..., 0, :].mean(2)
            if view.noted is not None:
                age = torch.arange(keys.shape[2], 0, -1, device=keys.device)
                scores = torch.where(age <= view.noted[..., None], torch.inf, scores)
        else:
            scores = view.column_sums(queries, keys).mean(1, keepdim=True)
            if view.vision is not None:
                of_vision = weighted_question_attention(queries, keys, view)[:, None]
                scores = text_first(torch.where(view.vision[:, None], of_vision, scores), view)
            scores = scores.expand(keys.shape[:3])
        return view.protect_sinks(scores, self.sinks)

    def note(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return how many tokens of the question each head keeps."""
        if view.is_decoding:
            return view.noted
        question = observer_queries(view, keys)[:, None].expand(keys.shape[:3])
        return (question.gather(2, kept.indices.clamp(min=0)) & (kept.indices >= 0)).sum(2)


def weighted_question_attention(queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Return the attention that each key receives from the queries after the last image: (batch, keys).

    Each query is weighted by the mean attention that it receives from those that see it. Attention is averaged over the
    heads."""
    asking = observer_queries(view, keys)
    received = view.column_sums(queries, keys, asking).mean(1)
    column = torch.arange(keys.shape[2], 0, -1, device=keys.device)  # how many queries see each
    weight = received / column * asking
    return view.column_sums(queries, keys, weight).mean(1)
