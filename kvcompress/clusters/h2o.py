"""H2O: heavy hitters, the keys with the most attention summed over all queries. https://arxiv.org/abs/2306.14048"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@dataclass(frozen=True)
class HeavyHitterKVCluster(KVCluster):
    """Keeps the keys with the largest accumulated attention; `recent` of the budget goes to the most recent tokens.

    While decoding, every new query's attention is added to the sums."""

    recent: Annotated[float, Field(ge=0, le=1)] = 0.5

    recent_tenth: ClassVar[bool] = False
    decode_interval: ClassVar[int] = 1
    query_window: ClassVar[int] = 0  # `observe` has already seen them

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        return view.column_sums(queries, keys)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return self.summed(queries, keys, view)

    def recent_tokens(self, budget: int) -> int:
        return effivlm_window(budget) if self.of_variant("recent_tenth") else int(self.recent * budget)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        # Not in `score`: only here is the budget the layer's own, and merging still needs the recent tokens' sums.
        recent = [self.recent_tokens(budget) for budget in view.budgets]
        return super().final_scores(view.protect_recent(scores, recent), view)


@register_method("h2o")
@dataclass(frozen=True)
class H2OKVCluster(HeavyHitterKVCluster):
    """Keeps heavy hitters and recent tokens, half and half as published (section 4.2).

    `variant="effivlm"` gives recent tokens a tenth of the budget."""

    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}
