"""StreamingLLM: attention sinks and the most recent tokens. https://arxiv.org/abs/2309.17453"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


def sinks_and_recent(keys: torch.Tensor, sinks: int, padding: torch.Tensor | None) -> torch.Tensor:
    """Return scores (batch, kv_heads, keys) that rank the last token first, then the sinks, then the rest by recency.

    The first `sinks` tokens rank in their order. `keys` is (batch, kv_heads, keys, ...); padding is as in
    scoring/windows.py."""
    tokens = keys.shape[2]
    position = torch.arange(tokens, device=keys.device, dtype=torch.float32)
    if padding is not None:
        position, tokens = position - padding[..., None], tokens - padding[..., None]  # 0 at the first real token
    score = torch.where(position < sinks, 2 * tokens - position, position)
    score[..., -1:] = float("inf")  # a slice: torch 2.11 waits for the device to set one number
    return score.expand(keys.shape[:3])


@register_method("streamingllm")
@dataclass(frozen=True)
class StreamingLLMKVCluster(KVCluster):
    """Keeps the first `sinks` tokens and the most recent ones (section 3.2; 4 sinks as published).

    With `variant="effivlm"` the most recent tokens get a tenth of the budget and the first tokens the rest.

    `positions="cache"` re-rotates keys to their position in the cache, as published. By default keys keep their true
    positions, which changes only the distance to the sinks. If the budget has no room for all sinks, the last token
    stays and the first sinks fill the rest.
    """

    sinks: NonNegativeInt = 4
    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    query_window: ClassVar[int] = 0  # asks no query
    recent_tenth: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        sinks = keys.shape[2] if self.of_variant("recent_tenth") else self.sinks
        return sinks_and_recent(keys, sinks, view.padding)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        if self.of_variant("recent_tenth"):
            scores = view.protect_recent(scores, [effivlm_window(budget) for budget in view.budgets])
        return super().final_scores(scores, view)
