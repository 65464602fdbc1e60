"""Value norm: a token whose value is long weighs more in the output, whoever attends to it."""

from dataclasses import dataclass

import torch

from ..methods import register_method
from ..scoring.layer_view import Prompt
from .base import KVCluster


@register_method("vnorm")
@dataclass(frozen=True)
class VNormKVCluster(KVCluster):
    """Keeps the values with the largest L2 norm: the part of VATP's score (https://arxiv.org/abs/2406.12335, eq. 3)
    that needs no attention."""

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        return values.float().norm(dim=-1)
