"""MEDA: layers whose modalities look at much of each other keep more. https://arxiv.org/abs/2502.17599"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.vision import text_first
from .base import KVCluster
from .h2o import H2OKVCluster


@register_method("meda")
@dataclass(frozen=True)
class MEDAKVCluster(KVCluster):
    """Keeps recent tokens, `recent` of a layer's budget, and those with the largest accumulated attention, text before
    vision, and merges each evicted entry into the kept one with the likest key (half and half, pivotal
    merging). Layers share the budget by their cross-modal attention entropy (`layer_budget="entropy"`).

    Where text alone exceeds the budget, text is ranked by its attention. While decoding, all is text.
    """

    recent: Annotated[float, Field(ge=0, le=1)] = 0.5

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.17599"
    layer_budget: ClassVar[str] = "entropy"
    merge: ClassVar[str] = "pivot"
    query_window: ClassVar[int] = 0  # `observe` has seen them

    observe = H2OKVCluster.observe

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return text_first(self.summed(queries, keys, view), view)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        recent = [int(self.recent * budget) for budget in view.budgets]  # of the layer's own budget
        return super().final_scores(view.protect_recent(scores, recent), view)
