"""Key norm: keys with a small norm tend to receive much attention. https://arxiv.org/abs/2406.11430"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("knorm")
@dataclass(frozen=True)
class KnormKVCluster(KVCluster):
    """Keeps the keys with the smallest L2 norm (section 3).

    The paper leaves the first two layers uncompressed; here every layer has the same budget."""

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"
    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return -keys.float().norm(dim=-1)
