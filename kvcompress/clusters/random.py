"""Random eviction: the baseline that every method has to beat."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import LayerView, uniform_noise
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("random")
@dataclass(frozen=True)
class RandomKVCluster(KVCluster):
    """Keeps the last `window_size` tokens and a uniformly random set per layer and KV head.

    With `variant="effivlm"` the recent tokens get a tenth of the budget. The draw depends on `seed`, the layer and the
    row's own tokens, so it is the same in any batch and on any device, but differs between prompts and between
    evictions.
    """

    seed: int = 0
    window_size: NonNegativeInt = 8
    variant: Literal["paper", "effivlm"] = "paper"

    mixes_heads: ClassVar[bool] = True  # one draw for all heads
    query_window: ClassVar[int] = 0  # asks no query
    recent_tenth: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return uniform_noise(view, keys, self.seed)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        tenth = self.of_variant("recent_tenth")
        windows = [effivlm_window(n) if tenth else self.window_size for n in view.budgets]
        return super().final_scores(view.protect_recent(scores, windows), view)
