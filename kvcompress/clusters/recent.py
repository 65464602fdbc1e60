"""The most recent tokens only: a baseline that knows nothing of the prompt."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster
from .streamingllm import sinks_and_recent


@register_method("recent")
@dataclass(frozen=True)
class RecentKVCluster(KVCluster):
    """Keeps the most recent tokens, without attention sinks."""

    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return sinks_and_recent(keys, 0, view.padding)
