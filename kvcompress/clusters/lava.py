"""LAVa: attention times the largest value; heads and layers share by it. https://arxiv.org/abs/2509.09754"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import pool_scores
from .snapkv import WindowKVCluster


@register_method("lava")
@dataclass(frozen=True)
class LAVaKVCluster(WindowKVCluster):
    """Keeps the observation window and the keys with the highest attention of the window, pooled, times the largest L1
    norm of the head's values: a bound on what the layer's output loses. Of a KV head's query heads the one that attends
    most counts. KV heads share a layer's budget by these scores (as in AdaKV, a fifth is even), layers the whole budget
    by the scores' entropy (`layer_budget="lava"`). Window 32 and max pooling over 7 as in its code; its settings of
    InfiniteBench are a preset."""

    window_size: PositiveInt = 32
    kernel_size: PositiveInt = 7
    pooling: Literal["avg", "max"] = "max"

    paper: ClassVar[str] = "https://arxiv.org/abs/2509.09754"
    layer_budget: ClassVar[str] = "lava"
    head_budget: ClassVar[str] = "adaptive"
    presets: ClassVar[dict[str, dict[str, object]]] = {"infinitebench": {"window_size": 64, "budget": 10000}}

    def pooled(self, votes: torch.Tensor) -> torch.Tensor:
        return pool_scores(votes, self.kernel_size, self.pooling).amax(2)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = super().score(queries, keys, values, view)
        older = view.real_columns(keys) & scores.isfinite()  # than the window
        largest = values.float().abs().sum(-1).masked_fill(~older, 0.0).amax(2, keepdim=True)
        return torch.where(older, scores * largest, scores)
