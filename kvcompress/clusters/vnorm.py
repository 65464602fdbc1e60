"""Value norm: a token whose value is long weighs more in the output, whoever attends to it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from .base import KVCluster


@register_method("vnorm")
@dataclass(frozen=True)
class VNormKVCluster(KVCluster):
    """Keeps the values with the largest L2 norm: the part of VATP's score (https://arxiv.org/abs/2406.12335, eq. 3)
    that needs no attention."""

    query_window: ClassVar[int] = 0  # asks no query

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return values.float().norm(dim=-1)
