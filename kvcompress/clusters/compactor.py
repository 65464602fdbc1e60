"""Compactor: keys with high leverage that neighbours attend to. https://arxiv.org/abs/2507.08143"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from ..device import on_device
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster
from .leverage import leverage_scores
from .non_causal_attention import value_weighted_votes


@register_method("compactor")
@dataclass(frozen=True)
class CompactorKVCluster(KVCluster):
    """Keeps the first `sinks`, the last `recent` tokens, and those with the most non-causal attention and leverage.

    The score is the sum of non-causal attention and `blending` times approximate leverage, both standardised over a
    layer's heads and tokens. The defaults are those of the authors' kvpress; by default `blending` is the part of the
    prompt that is evicted. The question is not needed, so the method suits a cache that answers many. `sketch`, `seed`:
    see `leverage`; `chunk_size`: see `non-causal-attention`; `variant="kvpress"` is that of both.

    The paper's engine, compactor-vllm, uses a blending of 0.5, does not weigh by values, measures leverage in chunks
    and lets heads share a budget (`head_budget=adaptive`).
    """

    sinks: NonNegativeInt = 8
    recent: NonNegativeInt = 4
    chunk_size: PositiveInt = 256
    sketch: PositiveInt = 48
    blending: Annotated[float, Field(ge=0)] | None = None
    seed: int = 0
    variant: Literal["exact", "kvpress"] = "exact"

    paper: ClassVar[str] = "https://arxiv.org/abs/2507.08143"
    mixes_heads: ClassVar[bool] = True  # standardises over them
    whole_prompt: ClassVar[bool] = True
    unrotated_keys: ClassVar[bool] = True
    fills_chunks: ClassVar[bool] = False
    sketches_all: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"fills_chunks": True, "sketches_all": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        real = view.real_columns(keys)
        ends = view.protect_recent(real.float(), self.recent).isinf() | (real.cumsum(-1) <= self.sinks)
        counted = real & ~ends
        fills, sketches_all = self.of_variant("fills_chunks"), self.of_variant("sketches_all")
        leverage = leverage_scores(view.before_rotation(keys), counted, self.sketch, self.seed, sketches_all)
        votes = value_weighted_votes(queries, keys, values, view, self.chunk_size, counted, self.sinks, fills)
        blending = on_device(self._blending(view), keys.device, torch.float32)[:, None, None]
        scores = blending * standardised(leverage, counted) + standardised(votes, counted)
        return scores.masked_fill(ends, float("inf"))

    def _blending(self, view: LayerView) -> list[float]:
        budgets = view.mean_budgets or view.budgets
        evicted = [(tokens - budget) / max(tokens, 1) for budget, tokens in zip(budgets, view.tokens, strict=True)]
        return evicted if self.blending is None else [self.blending] * len(evicted)


def standardised(scores: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Scale scores (batch, kv_heads, columns) to mean 0 and variance 1 over a row's counted columns of all heads."""
    counted = counted.expand_as(scores)
    number = counted.sum((1, 2), keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~counted, 0.0).sum((1, 2), keepdim=True) / number
    centred = (scores - mean).masked_fill(~counted, 0.0)
    return centred / (centred.square().sum((1, 2), keepdim=True) / number).sqrt().clamp(min=1e-6)
