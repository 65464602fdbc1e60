"""ChunkKV: whole chunks of neighbouring tokens, to keep related tokens together. https://arxiv.org/abs/2502.00299"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import aligned_left, aligned_right
from .snapkv import WindowKVCluster


@register_method("chunkkv")
@dataclass(frozen=True)
class ChunkKVCluster(WindowKVCluster):
    """Keeps the chunks of `chunk_size` tokens with the highest mean of SnapKV's scores (algorithm 1).

    All heads keep the same chunks. Chunks are counted from a row's first token; those that overlap the observation
    window are kept first. The budget is exact: if the last chunk only fits in part, its most recent tokens stay.
    """

    chunk_size: PositiveInt = 20

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.00299"
    head_budget: ClassVar[str] = "shared"

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        size, padding, columns = self.chunk_size, view.padding, keys.shape[2]
        scores = aligned_left(super().score(queries, keys, values, view), padding)
        # A row's last chunk may be shorter; it overlaps the window, so its mean is +inf anyway.
        means = F.pad(scores, (0, -columns % size)).unflatten(-1, (-1, size)).mean(-1)
        return aligned_right(means.repeat_interleave(size, dim=-1)[..., :columns], padding)
