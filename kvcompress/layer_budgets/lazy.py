"""Layers that only look at the first and the last tokens keep little. https://arxiv.org/abs/2410.13846"""

from typing import ClassVar

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget

FIRST, LAST = 4, 1024  # tokens that a lazy layer looks at
THRESHOLD = 0.9  # of the attention, where the method has no `lazy_threshold`
SHARE = 0.25  # what a lazy layer keeps of what another one keeps


class _LazyLayers(LayerBudget):
    """Lazy is a layer whose last `judges` queries spend more than the method's `lazy_threshold` of their attention on
    the first 4 tokens and the most recent ones, in the mean over queries and heads (SimLayerKV, section 3)."""

    judges: ClassVar[int] = 32

    def recent(self, view: LayerView) -> list[int]:
        """How many recent tokens of each row that is."""
        return [LAST] * len(view.lengths)

    def is_lazy(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """bool (batch,)"""
        columns = keys.shape[2]
        weights = view.window_attention(queries, keys, self.judges)
        rows = weights.shape[3]
        column = torch.arange(columns, device=keys.device)
        position = column if view.padding is None else column - view.padding[:, :1]
        query = column[-rows:, None]
        recent = on_device(self.recent(view), keys.device)[:, None, None]
        near = (query - column < recent) | (position < FIRST).view(-1, 1, columns)  # (batch, queries, columns)
        spent = (weights * near[:, None, None]).sum((1, 2, 3, 4)) / queries.shape[1]
        judges = on_device(view.lengths, keys.device).clamp(max=rows)
        return spent / judges > getattr(view.settings.cluster, "lazy_threshold", THRESHOLD)


@register_layer_budget("lazy")
class LazyLayerBudget(_LazyLayers):
    """A lazy layer gets a quarter of what the others get. Lazy is a layer whose last 32 queries spend more than
    the method's `lazy_threshold` of their attention on the first 4 tokens and the last 1024, in the mean over queries
    and heads (SimLayerKV, section 3). With all layers alike, all get the same."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return torch.where(self.is_lazy(queries, keys, view), SHARE, 1.0)


@register_layer_budget("lazy-paper")
class PublishedLazyLayerBudget(_LazyLayers):
    """Only lazy layers are cut, to the budget that was asked for; every other layer keeps all. So the budget is the
    first 4 tokens and the most recent ones that a layer is judged by (4 + 1024 as published), and what is kept follows
    from the prompt. The last 32 queries judge (SimLayerKV-prefill)."""

    is_exact = False

    def recent(self, view: LayerView) -> list[int]:
        return [max(budget - FIRST, 0) for budget in view.budgets]

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return self.is_lazy(queries, keys, view).float()

    def budgets(self, view: LayerView, measured: torch.Tensor | None = None) -> list[list[int]]:
        rows = list(zip(view.budgets, view.lengths, strict=True))
        return [
            [budget if lazy else length for lazy, (budget, length) in zip(layer, rows, strict=True)]
            for layer in measured.tolist()
        ]


@register_layer_budget("lazy-code")
class ReleasedLazyLayerBudget(PublishedLazyLayerBudget):
    """As `lazy-paper`, judged by one query as in the released code (SimLayerKV-decode), there the first that is
    decoded, here the prompt's last."""

    judges = 1
