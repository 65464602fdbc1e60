"""MEDA: layers whose attention is spread keep more. https://arxiv.org/abs/2502.17599"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import text_first
from .base import KVCluster
from .h2o import H2OKVCluster


@register_method("meda")
@dataclass(frozen=True)
class MEDAKVCluster(KVCluster):
    """Keeps recent tokens, `recent` of a layer's budget, and those with the largest accumulated attention, text before
    vision, and merges evicted entries into kept ones, which become their mean. Layers share the budget by the entropy
    of their attention (`layer_budget="attention-entropy"`). So do the authors' scripts
    (modify_llama.py, AttnEntropyTextAVGMergeKVCache_LayerWise); `variant="paper"` shares by cross-modal entropy
    (`layer_budget="entropy"`) and merges each entry into the one with the likest key, half and half (`merge="pivot"`).

    `merge="meda"` is averaging to the letter of the code, which finds out which evicted entries are more like a kept
    one than all are in the mean, and then merges as many, but the first ones, into the kept entries that it has found;
    `merge="average"` merges every entry into its own likest. Theirs keeps all text, and where half of a layer's budget
    is less than the text, 100 recent tokens more than there is text, on top of the budget. Here nothing is on top:
    where text alone exceeds the budget, text is ranked by its attention. While decoding, all is text.
    """

    recent: Annotated[float, Field(ge=0, le=1)] = 0.5
    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.17599"
    layer_budget: ClassVar[str] = "attention-entropy"
    merge: ClassVar[str] = "meda"
    by_variant: ClassVar = {"paper": {"layer_budget": "entropy", "merge": "pivot"}}
    query_window: ClassVar[int] = 0  # `observe` has seen them

    observe = H2OKVCluster.observe

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return text_first(self.summed(queries, keys, view), view)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        recent = [int(self.recent * budget) for budget in view.budgets]  # of the layer's own budget
        return super().final_scores(view.protect_recent(scores, recent), view)
