"""D2O: heavy hitters, into which similar evicted entries are merged. https://arxiv.org/abs/2406.13035"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from .h2o import HeavyHitterKVCluster


@register_method("d2o")
@dataclass(frozen=True)
class D2OKVCluster(HeavyHitterKVCluster):
    """Keeps the first `sinks` tokens, heavy hitters and recent tokens, the last two in equal parts (`recent`).

    Layers share the budget by the variance of their attention (`layer_budget="variance"`). An evicted entry is merged
    into the kept entry with the most similar key if the similarity reaches a threshold (`merge="d2o"`); otherwise it is
    dropped. The threshold starts as the mean similarity of the evicted entries and is then updated as a moving average.

    As in the released code, the kept entry becomes the plain mean of itself and the evicted entries times their cosine,
    and the old and the new threshold count equally. `variant="paper"` keeps three heavy hitters per recent token,
    weights entries by the exponential of the cosine, and gives the latest eviction a weight of 0.7 in the threshold
    (`merge="d2o-paper"`).
    """

    sinks: NonNegativeInt = 4
    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.13035"
    layer_budget: ClassVar[str] = "variance"
    merge: ClassVar[str] = "d2o"
    recent_quarter: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"paper": {"merge": "d2o-paper", "recent_quarter": True}}

    def recent_tokens(self, budget: int) -> int:
        return budget // 4 if self.of_variant("recent_quarter") else super().recent_tokens(budget)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        return super().final_scores(view.protect_sinks(scores, self.sinks), view)
