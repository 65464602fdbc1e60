"""SnapKV: keys that the last queries of the prompt attend to. https://arxiv.org/abs/2404.14469"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..device import on_device
from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import pool_scores
from .base import KVCluster

# As in KVCache-Factory's run_longbench.py, for capacities (`budget=`) from 64 to 2048.
LONGBENCH = {"window_size": 8, "kernel_size": 7, "pooling": "max"}


@dataclass(frozen=True)
class WindowKVCluster(KVCluster):
    """Keeps an observation window, the last `window_size` tokens, and the keys that its queries vote for.

    Votes are averaged over the query heads of each KV head, then pooled along the keys to keep neighbours together. If
    the budget is smaller than the window, the most recent tokens stay.
    """

    window_size: PositiveInt = 32
    kernel_size: PositiveInt = 5
    pooling: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        if self.kernel_size % 2 == 0:
            raise KVCompressError(f"kernel_size={self.kernel_size} is even: pooling is centred, so it must be odd")

    def windows(self, view: LayerView) -> list[int]:
        """Return the number of tokens in each row's window."""
        return [self.window_size] * len(view.lengths)

    def votes(self, weights: torch.Tensor, in_window: torch.Tensor | None) -> torch.Tensor:
        """Average attention over the window: (batch, kv_heads, groups, keys).

        Args:
            weights: attention weights (batch, kv_heads, groups, queries, keys).
            in_window: bool (batch, 1, 1, queries, 1), True for real queries in their row's window; None if all are.
        """
        if in_window is None:
            return weights.sum(3) / weights.shape[3]
        return (weights * in_window).sum(3) / in_window.sum(3).clamp(min=1)

    def pooled(self, votes: torch.Tensor) -> torch.Tensor:
        """Average `votes` over the query heads of a group and pool them: (batch, kv_heads, keys)."""
        return pool_scores(votes.mean(2), self.kernel_size, self.pooling)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        windows = [min(window, keys.shape[2]) for window in self.windows(view)]
        weights = view.window_attention(queries, keys, max(windows))
        real = view.real_queries(queries, max(windows))
        # The window gets no votes itself.
        if min(windows) == max(windows):
            votes = self.votes(weights, real)
            votes[..., keys.shape[2] - windows[0] :] = 0
        else:
            sizes = on_device(windows, keys.device)[:, None]
            in_window = (torch.arange(weights.shape[3], 0, -1, device=keys.device) <= sizes)[:, None, None, :, None]
            before = torch.arange(keys.shape[2], 0, -1, device=keys.device) > sizes
            votes = self.votes(weights, in_window if real is None else in_window & real) * before[:, None, None]
        return view.protect_recent(self.pooled(votes), windows)


@register_method("snapkv")
@dataclass(frozen=True)
class SnapKVCluster(WindowKVCluster):
    """Keeps the observation window and the keys that its queries attend to most (section 4, listing 1).

    A key's score is its mean weight over the window's queries and a KV head's query heads, pooled over the keys. With
    `variant="effivlm"` the window is a tenth of the budget; while decoding it is at most `window_size`, the number of
    queries that are remembered."""

    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {"window_size": 32, "kernel_size": 7, "pooling": "max"},
        "longbench": LONGBENCH,
        "kvpress": {"window_size": 64},
    }
    recent_tenth: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}

    def windows(self, view: LayerView) -> list[int]:
        if not self.of_variant("recent_tenth"):
            return super().windows(view)
        most = self.window_size if view.is_decoding else max(view.lengths)
        return [min(effivlm_window(budget), most) for budget in view.mean_budgets or view.budgets]
