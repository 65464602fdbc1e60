"""SAGE-KV: tokens that the prompt's last token attends to, chosen once. https://arxiv.org/abs/2503.08879"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from .h2o import HeavyHitterKVCluster


@register_method("sagekv")
@dataclass(frozen=True)
class SAGEKVCluster(HeavyHitterKVCluster):
    """Keeps sinks, recent tokens, and the tokens between them that the prompt's last query attends to most (section 3).

    The first `sinks` tokens stay, and `recent` of the budget goes to the most recent ones. Attention is averaged over
    the query heads of each KV head. The choice is made once: while decoding, sinks and chosen tokens stay and the
    recent window slides, so the oldest of the other tokens is evicted.
    """

    sinks: NonNegativeInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.08879"
    whole_prompt: ClassVar[bool] = True

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.is_decoding:
            return torch.zeros(keys.shape[:3], device=keys.device)
        received = view.window_attention(queries, keys, 1)[..., 0, :].mean(2)
        position = view.positions(keys)
        return received.masked_fill((position >= 0) & (position < self.sinks), float("inf"))

    def carried(self, sums: torch.Tensor, view: LayerView) -> torch.Tensor:
        # Recent tokens were not chosen: once they leave the window they are evicted before chosen ones, oldest first.
        recent = view.protect_recent(sums, [self.recent_tokens(budget) for budget in view.budgets]) == torch.inf
        return torch.where(recent & (sums != torch.inf), 0.0, sums)

    def recent_tokens(self, budget: int) -> int:
        return max(1, super().recent_tokens(budget))
