"""Expected attention: what queries to come will attend to. https://arxiv.org/abs/2510.00636"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from .base import KVCluster


@register_method("expected-attention")
@dataclass(frozen=True)
class ExpectedAttentionKVCluster(KVCluster):
    """Keeps what future queries are expected to take most from: mean attention weight times the value's norm
    (4 sinks, 512 positions and epsilon 0 as in the authors' kvpress; its leaderboard has epsilon 0.01 and adaptive
    heads).

    Queries before their rotation are taken as Gaussian; their mean and covariance over the prompt, turned by the mean
    rotation of the next `future` text positions, give the expected weight of a key in closed form. Sinks count neither
    as queries nor as keys, and stay. In chunked prefill the statistics are of the latest chunk's queries, while
    decoding of the last `window_size`.
    """

    sinks: NonNegativeInt = 4
    future: PositiveInt = 512
    covariance: bool = True
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    window_size: PositiveInt = 128

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.00636"
    unrotated_queries: ClassVar[bool] = True

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        mean, covariance = future_queries(queries, view, self.sinks, self.future)
        keys = keys.float()
        # (batch, kv_heads, groups, ...): the query heads of each KV head
        mean = mean.unflatten(1, (keys.shape[1], -1))
        logits = mean @ keys.mT * view.scaling
        if self.covariance:
            for group, spread in enumerate(covariance.unflatten(1, (keys.shape[1], -1)).unbind(2)):
                logits[:, :, group] += (keys @ spread * keys).sum(-1) * view.scaling**2 / 2
        position = torch.arange(keys.shape[2], device=keys.device)
        if view.padding is not None:
            position = position - view.padding[..., None]
        sinks = (position < self.sinks).expand(keys.shape[:3])  # and pads
        weights = logits.masked_fill(sinks[:, :, None], float("-inf")).softmax(-1).mean(2)
        return ((weights + self.epsilon) * values.float().norm(dim=-1)).masked_fill(sinks, float("inf"))


def future_queries(
    queries: torch.Tensor, view: LayerView, sinks: int, future: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (batch, heads, head_dim) and covariance (batch, heads, head_dim, head_dim) of the queries to come: those of
    the given ones, before RoPE and without each row's first `sinks`, under the mean rotation of the next `future` text
    positions."""
    count, head_dim = queries.shape[2:]
    tokens = torch.tensor(view.tokens, device=queries.device)[:, None]
    position = torch.arange(count, device=queries.device) + tokens - count  # among the row's tokens
    counted = (position >= sinks)[:, None, :, None] & ~queries[..., :1].isnan()
    number = counted.sum(2, keepdim=True).clamp(min=1)
    queries = queries.float().masked_fill(~counted, 0.0)
    mean = queries.sum(2, keepdim=True) / number
    centred = (queries - mean).masked_fill(~counted, 0.0)
    covariance = centred.mT @ centred / number
    padding = None if view.is_decoding else view.padding
    rotation = view.rotary.mean_rotation(future, head_dim, padding)[:, None]
    return (mean @ rotation.mT)[:, :, 0], rotation @ covariance @ rotation.mT
