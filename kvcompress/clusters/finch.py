"""Finch: keys that the question attends to, each of its words counting equally. https://arxiv.org/abs/2408.00167"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..device import on_device
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("finch")
@dataclass(frozen=True)
class FinchKVCluster(KVCluster):
    """Keeps the last `window_size` tokens, taken to be the question, and the keys that they attend to most.

    A query's weights are multiplied by the number of keys before it; otherwise early queries, which see fewer keys,
    would dominate. `normalize=False` uses the weights unchanged.

    `positions="cache"` re-rotates kept keys to their position in the cache, as published. The paper reads a prompt
    chunk by chunk: `prefill_chunk` does so, with true positions.
    """

    window_size: PositiveInt = 32
    normalize: bool = True

    paper: ClassVar[str] = "https://arxiv.org/abs/2408.00167"

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        window = min(self.window_size, keys.shape[2])
        weights = view.window_attention(queries, keys, window)
        if self.normalize:
            lengths = on_device(view.lengths, keys.device)[:, None]
            before = (lengths - torch.arange(weights.shape[3], 0, -1, device=keys.device)).clamp(min=0)
            weights = weights * before[:, None, None, :, None]
        return view.protect_recent(weights.mean((2, 3)), window)
