"""LAVa: attention times the largest value, which also divides the budget. https://arxiv.org/abs/2509.09754"""

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
    """Keeps the observation window and the keys with the highest window attention times the largest value norm.

    The window's attention is pooled, and the largest over a KV head's query heads counts. The norm is the largest L1
    norm of the head's values. Their product bounds the loss in the layer's output. KV heads share a layer's budget by
    these scores (as in AdaKV, a fifth is shared evenly), and layers share the whole budget by the scores' entropy
    (`layer_budget="lava"`). Window 32 and max pooling over 7 are the released settings; those for InfiniteBench are a
    preset.
    """

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
        older = view.real_columns(keys) & scores.isfinite()  # older than the window
        largest = values.float().abs().sum(-1).masked_fill(~older, 0.0).amax(2, keepdim=True)
        return torch.where(older, scores * largest, scores)
