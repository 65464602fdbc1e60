"""PrefixKV: each layer keeps the prefix of its ranking that holds as much attention. https://arxiv.org/abs/2412.03409"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from .base import KVCluster
from .h2o import H2OKVCluster


@register_method("prefixkv")
@dataclass(frozen=True)
class PrefixKVCluster(KVCluster):
    """Keeps the keys with the largest accumulated attention over all queries and heads, the same in all heads, the
    first `sinks` tokens and the last (4 start tokens as in the paper's code).

    Layers share the budget so that each keeps about the same part of its attention (`layer_budget="prefix"`), found for
    each prompt; the paper finds it once, on ten samples, and reuses it. While decoding, attention is summed on; the
    paper's code drops the entry at a fixed distance from the end.
    """

    sinks: NonNegativeInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.03409"
    layer_budget: ClassVar[str] = "prefix"
    head_budget: ClassVar[str] = "shared"
    query_window: ClassVar[int] = 0  # `observe` has seen them

    observe = H2OKVCluster.observe

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return self.summed(queries, keys, view)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        return super().final_scores(view.protect_sinks(scores, self.sinks), view)
