"""VL-Cache: keys that the question attends to, more of them in dense layers. https://arxiv.org/abs/2410.23317"""

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
    """Keeps the keys with the largest attention accumulated over the queries after the last image (section 3.2).

    `recent` of the budget goes to the most recent tokens. Layers share the budget by the density of their attention
    (algorithm 1, `layer_budget="sparsity"`).

    Each KV head keeps its own keys, by the mean over its query heads; with `head_budget="shared"` all heads keep the
    same. `recent` is a part of the layer's own budget; with `variant="effivlm"` the window is a tenth of the mean
    budget, the same in every layer, as in EffiVLM-Bench.
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
        if self.of_variant("recent_tenth"):
            scores = view.protect_recent(scores, [effivlm_window(mean) for mean in view.mean_budgets or view.budgets])
        return scores

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        if not self.of_variant("recent_tenth"):
            scores = view.protect_recent(scores, [int(self.recent * budget) for budget in view.budgets])
        return super().final_scores(scores, view)
