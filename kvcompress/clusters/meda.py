"""MEDA: layers whose modalities look at much of each other keep more. https://arxiv.org/abs/2502.17599"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.layer_view import Prompt
from ..scoring.vision import text_first
from ..scoring.windows import protect_recent
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

    observe = H2OKVCluster.observe

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        sums = self.observe(queries, keys, prompt) if prompt.accumulated is None else prompt.accumulated
        return text_first(sums, prompt)

    def prepared(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        recent = [int(self.recent * budget) for budget in prompt.budgets]  # of the layer's own budget
        return super().prepared(protect_recent(scores, recent), prompt)
