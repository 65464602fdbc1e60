"""No compression: the full cache, run through the same code as every method for a fair comparison."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("full")
@dataclass(frozen=True)
class FullKVCluster(KVCluster):
    """Keeps every entry."""

    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return torch.zeros(keys.shape[:3], device=keys.device)
