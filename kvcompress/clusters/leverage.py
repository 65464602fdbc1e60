"""Leverage scores: keys that are no combination of other keys. https://arxiv.org/abs/2507.08143"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster

RIDGE = 1e-2  # on the Gram matrix's diagonal, as in the authors' code in kvpress


def leverage_scores(
    keys: torch.Tensor, counted: torch.Tensor, sketch: int, seed: int, sketches_all: bool = False
) -> torch.Tensor:
    """Return the diagonal of X (X'X + ridge)^-1 X', where X holds the centred keys.

    It is near 1 for a key that points where no other does. Scores are exact if the sketch is no smaller than a key,
    unless `sketches_all`; otherwise they are those of X times a Gaussian matrix (head_dim, sketch).

    Args:
        keys: (batch, kv_heads, columns, head_dim).
        counted: bool (batch, 1, columns), True for columns that are rows of X.
        seed: seed of the Gaussian matrix, which is the same for all layers, heads and rows.

    Returns:
        (batch, kv_heads, columns) in fp32, zero for columns that are not counted.
    """
    keys = keys.float().masked_fill(~counted[..., None], 0.0)
    mean = keys.sum(2, keepdim=True) / counted.sum(2, keepdim=True).clamp(min=1)[..., None]
    centred = (keys - mean).masked_fill(~counted[..., None], 0.0)
    if sketch < keys.shape[-1] or sketches_all:
        centred = centred @ gaussian(keys.shape[-1], sketch, seed).to(keys.device)
    centred = centred.double()  # a large common direction would round the ridge away
    gram = centred.mT @ centred + RIDGE * torch.eye(centred.shape[-1], dtype=torch.double, device=keys.device)
    return inverse_form(centred, gram)


def inverse_form(vectors: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Compute x' matrix^-1 x for each vector x.

    Takes vectors (..., columns, dims) and a positive definite matrix (..., dims, dims), both in double precision, and
    returns (..., columns) in fp32."""
    factor, _ = torch.linalg.cholesky_ex(matrix)  # unchecked: a row with infinite states has none
    return torch.linalg.solve_triangular(factor, vectors.mT, upper=False).square().sum(-2).float()


def gaussian(head_dim: int, sketch: int, seed: int) -> torch.Tensor:
    """Return a random projection (head_dim, sketch) that preserves lengths on average, the same on any device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, sketch, generator=generator, dtype=torch.float32) / sketch**0.5


@register_method("leverage")
@dataclass(frozen=True)
class LeverageKVCluster(KVCluster):
    """Keeps the keys with the highest approximate leverage before their rotation (the key geometry part of Compactor).

    A key's leverage is how much of it the other keys of its head do not explain. Keys are centred and projected by a
    Gaussian sketch of `sketch` dimensions (48 in the authors' kvpress), drawn from `seed`. Uses no queries.

    If the sketch is no smaller than a key, scores are exact; `variant="kvpress"` draws a Gaussian even then. While
    decoding, keys count as they are stored, which is rotated.
    """

    sketch: PositiveInt = 48
    seed: int = 0
    variant: Literal["exact", "kvpress"] = "exact"

    paper: ClassVar[str] = "https://arxiv.org/abs/2507.08143"
    query_window: ClassVar[int] = 0  # asks no query
    whole_prompt: ClassVar[bool] = True
    unrotated_keys: ClassVar[bool] = True
    sketches_all: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"sketches_all": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        keys, sketches_all = view.before_rotation(keys), self.of_variant("sketches_all")
        return leverage_scores(keys, view.real_columns(keys), self.sketch, self.seed, sketches_all)
