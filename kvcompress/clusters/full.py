"""No compression: the full cache, on the same path as every method, for a fair comparison."""

from dataclasses import dataclass

import torch

from ..methods import register_method
from ..scoring.layer_view import Prompt
from .base import KVCluster


@register_method("full")
@dataclass(frozen=True)
class FullKVCluster(KVCluster):
    """Keeps every entry."""

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        return torch.zeros(keys.shape[:3], device=keys.device)
