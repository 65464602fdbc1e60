"""KeyDiff: keys that differ from the mean key. https://arxiv.org/abs/2504.15364"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import pad_columns
from .base import KVCluster


@register_method("keydiff")
@dataclass(frozen=True)
class KeyDiffKVCluster(KVCluster):
    """Keeps the keys with the lowest cosine similarity to the mean of all normalised keys (section 3.2).

    Uses no queries."""

    paper: ClassVar[str] = "https://arxiv.org/abs/2504.15364"
    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        unit = F.normalize(keys.float(), dim=-1)
        if view.padding is not None:
            unit = unit.masked_fill(pad_columns(view.padding, keys.shape[2])[..., None], 0.0)
        anchor = F.normalize(unit.sum(2, keepdim=True), dim=-1)  # the sum points where the mean does
        return -(unit * anchor).sum(-1)
