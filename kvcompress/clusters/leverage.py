"""Leverage scores: keys that other keys do not add up to. https://arxiv.org/abs/2507.08143"""

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
    """The diagonal of X (X'X + ridge)^-1 X', where X are the centred keys: near 1 for a key that points where no other
    does. Exact where the sketch is no smaller than a key, unless `sketches_all`; else of X times a Gaussian (head_dim,
    sketch).

    Args:
        keys: (batch, kv_heads, columns, head_dim).
        counted: bool (batch, 1, columns), which columns are rows of X.
        seed: of the Gaussian, which is the same for all layers, heads and rows.

    Returns:
        (batch, kv_heads, columns) in fp32, zero where not counted.
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
    """x' matrix^-1 x of each vector x: vectors (..., columns, dims) and a positive definite matrix (..., dims, dims),
    in double precision, give (..., columns) in fp32."""
    factor, _ = torch.linalg.cholesky_ex(matrix)  # unchecked: of a row whose states are not finite it is not either
    return (vectors * torch.cholesky_solve(vectors.mT, factor).mT).sum(-1).float()


def gaussian(head_dim: int, sketch: int, seed: int) -> torch.Tensor:
    """A random projection (head_dim, sketch) that keeps lengths in the mean, the same on any device."""
    return torch.randn(head_dim, sketch, generator=torch.Generator().manual_seed(seed)) / sketch**0.5


@register_method("leverage")
@dataclass(frozen=True)
class LeverageKVCluster(KVCluster):
    """Keeps the keys of highest approximate leverage before their rotation (Compactor, its part about the keys'
    geometry): how much of a key the other keys of its head do not explain. Keys are centred and seen through a Gaussian
    sketch of `sketch` dimensions (48 in the authors' kvpress), drawn from `seed`. Needs no queries.

    Where the sketch is no smaller than a key, scores are exact; with `variant="kvpress"` a Gaussian is drawn then as
    well. While decoding keys count as they are stored: rotated.
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
