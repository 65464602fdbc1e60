"""LOOK-M: text first, and evicted entries merged into kept ones. https://arxiv.org/abs/2406.18139"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import text_first
from .base import KVCluster
from .h2o import H2OKVCluster


@register_method("look-m")
@dataclass(frozen=True)
class LookMKVCluster(KVCluster):
    """Keeps recent tokens and those with the largest accumulated attention, text before vision (section 3.2).

    Each evicted entry is merged into the kept entry with the most similar key (section 3.3). The default is pivotal
    merging, the best of the paper's three; `merge=` selects another, and `merge_modality=same` keeps text and vision
    apart.

    `recent` is the part of the budget for recent tokens, half as published; `variant="effivlm"` uses EffiVLM-Bench's
    tenth. If text alone exceeds the budget, text is ranked by its attention. While decoding, all tokens count as text.
    """

    recent: Annotated[float, Field(ge=0, le=1)] = 0.5
    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.18139"
    merge: ClassVar[str] = "pivot"
    recent_tenth: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}
    query_window: ClassVar[int] = 0  # `observe` has already seen them

    observe = H2OKVCluster.observe

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return text_first(self.summed(queries, keys, view), view)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        tenth = self.of_variant("recent_tenth")
        recent = [effivlm_window(n) if tenth else int(self.recent * n) for n in view.budgets]
        return super().final_scores(view.protect_recent(scores, recent), view)
