"""SnapKV: what the last queries of the prompt attend to. https://arxiv.org/abs/2404.14469"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..errors import KVCompressError
from ..scoring import pool_scores, window_attention
from .base import KVCluster, Prompt, register_method


@register_method("snapkv")
@dataclass(frozen=True)
class SnapKVCluster(KVCluster):
    """Keeps the observation window and the keys that its queries attend to most (section 4, listing 1).

    The weights of the last `window_size` queries are averaged over the window, pooled along the keys so that
    neighbours stay together, and averaged over the query heads of each KV head. Where the budget is smaller than
    the window, the most recent tokens stay.
    """

    window_size: PositiveInt = 32
    kernel_size: PositiveInt = 5
    pooling: Literal["avg", "max"] = "avg"

    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    def __post_init__(self) -> None:
        if self.kernel_size % 2 == 0:
            raise KVCompressError(f"kernel_size={self.kernel_size} is even: pooling is centred, so it must be odd")

    @property
    def query_window(self) -> int:
        return self.window_size

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        window = min(self.window_size, keys.shape[2])
        weights = window_attention(queries, keys, window, prompt.scaling, prompt.padding, prompt.columns, prompt.seen)
        votes = weights[..., :-window].mean(3)  # (batch, kv_heads, groups, keys - window)
        scores = torch.full(keys.shape[:3], float("inf"), device=keys.device)
        if votes.shape[-1]:
            scores[..., :-window] = pool_scores(votes, self.kernel_size, self.pooling).mean(2)
        return scores
