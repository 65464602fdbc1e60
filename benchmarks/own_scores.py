"""Scores that no published method has, for the search of benchmarks/own_method.py. Importing this registers them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from kvcompress.clusters.compactor import standardised
from kvcompress.clusters.leverage import leverage_scores
from kvcompress.clusters.snapkv import WindowKVCluster
from kvcompress.methods import register_method
from kvcompress.scoring.layer_view import LayerView


@register_method("attention-and-leverage")
@dataclass(frozen=True)
class AttentionAndLeverageKVCluster(WindowKVCluster):
    """What the window's queries attend to (SnapKV), plus `blending` times the leverage of the key before its rotation
    (Compactor's part about the keys' geometry), both standardised over a layer's heads and tokens.

    Attention has a long tail, leverage has not: the few entries that the question looks at come first, and what is left
    of the budget goes to keys that the others do not add up to, which longer answers will ask for.
    """

    blending: Annotated[float, Field(ge=0)] = 0.3
    sketch: int = 48

    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
    mixes_heads: ClassVar[bool] = True  # standardises over them
    whole_prompt: ClassVar[bool] = True
    unrotated_keys: ClassVar[bool] = True

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        attention = super().score(queries, keys, values, view)
        counted = view.real_columns(keys) & attention.isfinite()  # all but the window
        leverage = leverage_scores(view.before_rotation(keys), counted[:, :1], self.sketch, seed=0)
        mixed = standardised(attention.masked_fill(~counted, 0.0), counted)
        return torch.where(counted, mixed + self.blending * standardised(leverage, counted), attention)
