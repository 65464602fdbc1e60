"""H2O: heavy hitters, the keys that all queries together attend to most. https://arxiv.org/abs/2306.14048"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from ..kernels.column_sums import column_sums
from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import Prompt
from ..scoring.windows import protect_recent, window_attention
from .base import KVCluster


@dataclass(frozen=True)
class HeavyHitterKVCluster(KVCluster):
    """Keeps the keys with the largest accumulated attention, and for `recent` of the budget the most recent tokens.
    While decoding, every new query's attention is added to the sums."""

    recent: Annotated[float, Field(ge=0, le=1)] = 0.5

    decode_interval: ClassVar[int] = 1

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        if prompt.columns is None:
            return column_sums(queries, keys, prompt.scaling, prompt.padding)
        rows = queries.shape[2]
        weights = window_attention(queries, keys, rows, prompt.scaling, prompt.padding, prompt.columns, prompt.seen)
        return weights.sum(3).mean(2)

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        return self.observe(queries, keys, prompt) if prompt.accumulated is None else prompt.accumulated

    def recent_tokens(self, budget: int) -> int:
        return int(self.recent * budget)

    def prepared(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        # Not in `score`: here the budget is the layer's own, and merging still finds the recent tokens' sums.
        recent = [self.recent_tokens(budget) for budget in prompt.budgets]
        return super().prepared(protect_recent(scores, recent), prompt)


@register_method("h2o")
@dataclass(frozen=True)
class H2OKVCluster(HeavyHitterKVCluster):
    """Heavy hitters and recent tokens (section 4.2), half and half as published; `variant="effivlm"`: a tenth of the
    budget for recent tokens."""

    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"

    def recent_tokens(self, budget: int) -> int:
        return effivlm_window(budget) if self.variant == "effivlm" else super().recent_tokens(budget)
