"""DropKV: keys whose loss alone would change the output most. https://openreview.net/forum?id=MqfNzH3TVH"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import pool_scores
from .snapkv import WindowKVCluster

EPSILON = 1e-6  # added to 1 - p, as in kvpress


@register_method("dropkv")
@dataclass(frozen=True)
class DropKVCluster(WindowKVCluster):
    """Keeps the observation window and the keys whose loss would change the window's attention outputs most.

    Without a key of weight p and value v, the output o of a query becomes o + p / (1 - p) * (o - v), since the other
    weights grow to a sum of 1 again. A key's score is the squared length of this change, summed over the window's
    queries, averaged over the query heads of a KV head, and pooled along the keys, window included.
    """

    kernel_size: PositiveInt = 7

    paper: ClassVar[str] = "https://openreview.net/forum?id=MqfNzH3TVH"

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        weights = view.window_attention(queries, keys, self.window_size)  # (batch, kv_heads, groups, window, keys)
        values = values.float()[:, :, None]
        outputs = weights @ values
        factors = (weights / (1 - weights + EPSILON)).square()
        scores = torch.zeros_like(factors[..., 0, :])
        for query in range(factors.shape[3]):  # multiplied out, large terms would cancel
            change = values - outputs[..., query, None, :]
            scores += factors[..., query, :] * change.square().sum(-1)
        return view.protect_recent(pool_scores(scores.mean(2), self.kernel_size, self.pooling), self.window_size)
