"""Attention Matching: biases and values fitted to the attention to everything. https://arxiv.org/abs/2602.16284"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt

from ..methods import register_method
from ..scoring.layer_view import Kept, LayerView
from .base import KVCluster

BLOCK = 1024  # reference queries at a time
LEAST, MOST = math.exp(-3), math.exp(3)  # factor by which a bias weights a key
# Pulls what the reference queries leave open to the entry's own weight and value, far below the authors' rounding.
RIDGE = 1e-10


@register_method("attention-matching")
@dataclass(frozen=True)
class AttentionMatchingKVCluster(KVCluster):
    """Keeps the most attended keys, and fits a bias and a value to each, so that attention to them is attention to all.

    Reference queries are the prompt's own, of all query heads of a KV head; each attends to all keys, later ones
    included. A key's score is the root mean square of its weights. The biases, added to the kept keys' logits, give
    them the mass of all keys (least squares, then `steps` of projected gradient descent), and the values give each
    reference query the output that it has with all keys (least squares).

    Cached keys have one channel more, which holds the bias. `bias=none` and `values=own` leave a part out; both
    together are eviction alone. More than `references` queries are thinned out evenly.
    """

    references: PositiveInt = 100_000
    bias: Literal["fitted", "none"] = "fitted"
    values: Literal["fitted", "own"] = "fitted"
    steps: NonNegativeInt = 2

    paper: ClassVar[str] = "https://arxiv.org/abs/2602.16284"
    biases_keys: ClassVar[bool] = True
    whole_prompt: ClassVar[bool] = True
    fills_budget: ClassVar[bool] = True

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        heads = zip(self._references(queries, keys), keys[..., :-1].flatten(0, 1), strict=True)
        scores = [_root_mean_square(asked, of_head, view.scaling) for asked, of_head in heads]
        return torch.stack(scores).view(keys.shape[:3])

    def update_kv(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        kept = super().update_kv(queries, keys, values, view)
        new_keys, new_values = kept.keys.clone(), kept.values.clone()
        for row, length in enumerate(view.lengths):
            first = keys.shape[2] - length
            asked = self._references(queries[row : row + 1, :, first:], keys[row : row + 1])
            for head, columns in enumerate(kept.indices[row]):
                stays = columns >= 0
                if length and int(stays.sum()) < length:
                    states = keys[row, head, first:, :-1], values[row, head, first:]
                    fitted = self._matched(asked[head], *states, columns[stays] - first, view.scaling)
                    new_keys[row, head, stays, -1] = fitted[0].to(keys.dtype)
                    most = torch.finfo(values.dtype).max  # a key of hardly any weight may get a value that fp16 lacks
                    new_values[row, head, stays] = fitted[1].clamp(-most, most).to(values.dtype)
        return replace(kept, keys=new_keys, values=new_values)

    def _references(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the reference queries of each KV head, (batch * kv_heads, references, head_dim)."""
        batch, kv_heads = keys.shape[:2]
        asked = queries.reshape(batch * kv_heads, -1, queries.shape[-1])
        if asked.shape[1] <= self.references:
            return asked
        return asked[:, torch.linspace(0, asked.shape[1] - 1, self.references).long().to(asked.device)]

    def _matched(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, columns: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return biases (kept,) and values (kept, head_dim) of the kept `columns`, given the reference queries
        (references, head_dim), keys and values (keys, head_dim) of a KV head."""
        values = values.float()
        bias, kept_values = values.new_zeros(len(columns)), values[columns]
        if self.bias == "fitted":
            weights = (each.exp() for each in _logits(queries, keys, scaling))
            gram, mass = _normal_equations((each[:, columns], each.sum(1, keepdim=True)) for each in weights)
            factors = _solved(gram, mass, torch.ones_like(mass)).clamp(LEAST, MOST)
            rate = 1 / torch.linalg.matrix_norm(gram, 2)
            for _ in range(self.steps):
                factors = (factors - rate * (gram @ factors - mass)).clamp(LEAST, MOST)
            bias = factors[:, 0].log().float()
        if self.values == "fitted":
            logits = _logits(queries, keys, scaling)
            parts = ((each[:, columns].add(bias).softmax(1), each.softmax(1) @ values) for each in logits)
            kept_values = _solved(*_normal_equations(parts), kept_values.double()).float()
        return bias, kept_values


def _logits(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> Iterator[torch.Tensor]:
    """Yield fp32 logits (some queries, keys), of which each query's highest is 0."""
    for block in queries.split(BLOCK):
        logits = block.float() @ keys.float().T * scaling
        yield logits - logits.amax(1, keepdim=True)


def _root_mean_square(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the root mean square of each key's weights over all queries, (keys,)."""
    return (sum(logits.softmax(1).square().sum(0) for logits in _logits(queries, keys, scaling)) / len(queries)).sqrt()


def _normal_equations(parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return AᵀA and AᵀB in fp64, given some rows of A and of B at a time."""
    gram = right = 0
    for a, b in parts:
        a, b = a.double(), b.double()
        gram, right = gram + a.T @ a, right + a.T @ b
    return gram, right


def _solved(gram: torch.Tensor, right: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the least-squares solution, drawn to `own` as far as the equations leave it open."""
    pulled = gram + RIDGE * gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).diag()
    return own + torch.cholesky_solve(right - gram @ own, torch.linalg.cholesky(pulled))
