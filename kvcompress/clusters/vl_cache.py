"""VL-Cache: what the question attends to, more of it where attention is dense. https://arxiv.org/abs/2410.23317"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import DECODED_QUERIES, question_attention
from .base import KVCluster


@register_method("vl-cache")
@dataclass(frozen=True)
class VLCacheKVCluster(KVCluster):
    """Keeps the keys with the largest attention accumulated over the queries behind the last image (section 3.2), and
    for `recent` of the budget the most recent tokens; layers share the budget by their density (algorithm 1,
    `layer_budget="sparsity"`).

    Each KV head keeps its own, by the mean over its query heads; `head_budget="shared"` lets all heads keep the same.
    `recent` counts from a layer's own budget; `variant="effivlm"` is EffiVLM-Bench's window of a tenth of the mean
    budget, the same in every layer.
    """

    recent: Annotated[float, Field(ge=0, le=1)] = 0.1
    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.23317"
    whole_prompt: ClassVar[bool] = True
    layer_budget: ClassVar[str] = "sparsity"
    query_window: ClassVar[int] = DECODED_QUERIES
    recent_tenth: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = question_attention(queries, keys, view)
        if self.of_variant("recent_tenth"):  # here the budget is still the mean over the layers
            scores = view.protect_recent(scores, [effivlm_window(budget) for budget in view.budgets])
        return scores

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        if not self.of_variant("recent_tenth"):
            scores = view.protect_recent(scores, [int(self.recent * budget) for budget in view.budgets])
        return super().final_scores(scores, view)
