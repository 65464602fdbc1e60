"""CapKV: values that future queries reach and other values do not cover. https://arxiv.org/abs/2604.25975"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster
from .expected_attention import future_queries
from .leverage import inverse_form

EPSILON = 1e-6  # added to each token's weight in the capacity, as in kvpress


@register_method("capkv")
@dataclass(frozen=True)
class CapKVCluster(KVCluster):
    """Keeps the tokens whose removal would cost the cache most capacity, log det(I + sum of w v v').

    A token with value v and weight w scores w v' (I + sum)^-1 v, its weighted leverage, averaged over a KV head's query
    heads. Its weight is exp(`tau` * cosine) of its key and the mean future query, scaled to a maximum of 1.

    As in kvpress, tau is 5, 4 sinks stay and do not count, and queries get the mean rotation of the next `future` text
    positions; the paper uses products of unscaled vectors. While decoding, the last `window_size` queries are averaged.
    """

    tau: Annotated[float, Field(ge=0)] = 5.0
    sinks: NonNegativeInt = 4
    future: PositiveInt = 512
    window_size: PositiveInt = 128

    paper: ClassVar[str] = "https://arxiv.org/abs/2604.25975"
    unrotated_queries: ClassVar[bool] = True

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        mean, _ = future_queries(queries, view, self.sinks, self.future)
        real = view.real_columns(keys)
        sinks = real & (real.cumsum(-1) <= self.sinks)
        counted = (real & ~sinks).expand(keys.shape[:3])
        anchors = F.normalize(mean, dim=-1).unflatten(1, (keys.shape[1], -1))
        logits = self.tau * anchors @ F.normalize(keys.float(), dim=-1).mT  # (batch, kv_heads, groups, keys)
        logits = logits.masked_fill(~counted[:, :, None], float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True)).exp().nan_to_num(0.0)  # NaN: only sinks
        values = values.double().masked_fill(~counted[..., None], 0.0)
        scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        for weight in weights.unbind(2):
            scaled = values * (weight + EPSILON)[..., None]
            capacity = torch.eye(values.shape[-1], dtype=values.dtype, device=keys.device) + scaled.mT @ values
            scores += weight * inverse_form(values, capacity) / weights.shape[2]
        return scores.masked_fill(sinks, float("inf"))
