"""LagKV: tokens that stand out from the ones that follow. https://arxiv.org/abs/2504.04704"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import aligned_left, aligned_right
from .base import KVCluster


def lag_relative_information(states: torch.Tensor, lag: int) -> torch.Tensor:
    """Measure how much each token varies over the channels, each channel scaled by its range in the next partition.

    Args:
        states: (batch, kv_heads, partitions * lag, head_dim) in fp32.

    Returns:
        (batch, kv_heads, partitions - 1, lag), for all partitions but the last; sums to 1 in each partition.
    """
    parts = states.unflatten(2, (-1, lag))
    tokens, reference = parts[:, :, :-1], parts[:, :, 1:]
    least, most = reference.amin(3, keepdim=True), reference.amax(3, keepdim=True)
    span = (most - least).clamp(min=torch.finfo(torch.float32).eps)  # zero for equal tokens
    return ((tokens - least) / span).std(-1).softmax(-1)


@register_method("lagkv")
@dataclass(frozen=True)
class LagKVCluster(KVCluster):
    """Keeps, in each partition of `lag` tokens, those whose key and value stand out from the next partition.

    Uses no queries. The defaults are 16 sinks and a lag of 1024, as in the authors' code; `preset="kvpress"` has 4 and
    128.

    A row is cut into partitions after its sinks. Tokens compete by their rank in their partition, so all partitions
    keep equally many. The last whole partition serves only as a reference: it and the tokens after it stay as far as
    the budget allows, the most recent first. A row with less than two partitions therefore keeps sinks and recent
    tokens.
    """

    sinks: NonNegativeInt = 16
    lag: Annotated[int, Field(ge=2)] = 1024

    paper: ClassVar[str] = "https://arxiv.org/abs/2504.04704"
    presets: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"sinks": 4, "lag": 128}}
    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        sinks, lag, padding, columns = self.sinks, self.lag, view.padding, keys.shape[2]
        scores = torch.ones(keys.shape[:3], dtype=torch.float32, device=keys.device)
        partitions = (columns - sinks) // lag
        if partitions > 1:
            parts = slice(sinks, sinks + partitions * lag)
            of_keys, of_values = (
                lag_relative_information(aligned_left(states, padding)[:, :, parts].float(), lag)
                for states in (keys, values)
            )
            ranks = (of_keys + of_values).argsort(dim=-1, stable=True).argsort(-1)
            scores[:, :, sinks : parts.stop - lag] = ranks.flatten(2).float() / lag  # below 1
        position = torch.arange(columns, device=keys.device)
        length = columns if padding is None else columns - padding[..., None]
        scored = sinks + ((length - sinks) // lag - 1) * lag  # a row may end before the batch does
        scores = scores.masked_fill(position >= scored, 1.0).masked_fill(position < sinks, float("inf"))
        return aligned_right(scores, padding)
