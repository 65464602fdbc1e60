"""D2O: heavy hitters, merged with what is evicted and like them. https://arxiv.org/abs/2406.13035"""

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
    """Keeps the first `sinks` tokens, heavy hitters and recent tokens, half and half (`recent`). Layers share the
    budget by the variance of their attention (`layer_budget="variance"`). Evicted entries whose key is like a kept one,
    by at least a threshold, are merged into it (`merge="d2o"`), the others dropped: at first the mean likeness of what
    is evicted, then its moving average.

    The code merges by the plain mean of the kept entry and the evicted ones times their cosine; old and new threshold
    count alike. `variant="paper"`: three heavy hitters to one recent token, weights that are exponentials of the
    cosine, and a threshold to which the latest eviction adds 0.7 (`merge="d2o-paper"`).
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
