"""SimLayerKV: layers that attend only to the first and the last tokens keep little. https://arxiv.org/abs/2410.13846"""

from typing import ClassVar

import torch

from ..device import on_device
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget

FIRST, LAST = 4, 1024  # tokens that a lazy layer attends to
THRESHOLD = 0.9  # part of the attention, if the method has no `lazy_threshold`
SHARE = 0.25  # a lazy layer's budget, relative to another layer's


class _LazyLayers(LayerBudget):
    """Finds lazy layers (SimLayerKV, section 3).

    A layer is lazy if its last `judges` queries spend more than the method's `lazy_threshold` of their attention on the
    first 4 tokens and the most recent ones, averaged over queries and heads."""

    judges: ClassVar[int] = 32

    def recent(self, view: LayerView) -> list[int]:
        """Return the number of recent tokens in each row."""
        return [LAST] * len(view.lengths)

    def is_lazy(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return whether the layer is lazy for each row: bool (batch,)."""
        columns = keys.shape[2]
        weights = view.window_attention(queries, keys, self.judges)
        rows = weights.shape[3]
        column = torch.arange(columns, device=keys.device)
        query = column[-rows:, None]
        recent = on_device(self.recent(view), keys.device)[:, None, None]
        near = (query - column < recent) | (view.positions(keys)[:, :1] < FIRST)  # (batch, queries, columns)
        spent = (weights * near[:, None, None]).sum((1, 2, 3, 4)) / queries.shape[1]
        judges = on_device(view.lengths, keys.device).clamp(max=rows)
        return spent / judges > getattr(view.settings.cluster, "lazy_threshold", THRESHOLD)


@register_layer_budget("lazy")
class LazyLayerBudget(_LazyLayers):
    """Gives a lazy layer a quarter of what the others get (SimLayerKV, section 3).

    A layer is lazy if its last 32 queries spend more than the method's `lazy_threshold` of their attention on the first
    4 tokens and the last 1024, averaged over queries and heads. If all or no layers are lazy, all get the same."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return torch.where(self.is_lazy(queries, keys, view), SHARE, 1.0)


@register_layer_budget("lazy-paper")
class PublishedLazyLayerBudget(_LazyLayers):
    """Cuts only lazy layers, to the budget that was asked for; every other layer keeps all (SimLayerKV-prefill).

    The budget is thus the number of first and most recent tokens that a layer is judged by (4 + 1024 as published), and
    the total that is kept depends on the prompt. The last 32 queries judge."""

    is_exact = False

    def recent(self, view: LayerView) -> list[int]:
        return [max(budget - FIRST, 0) for budget in view.budgets]

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        return self.is_lazy(queries, keys, view).float()

    def of_row(self, measured: torch.Tensor, budget: int, length: int, view: LayerView) -> list[int]:
        return [budget if lazy else length for lazy in measured.tolist()]


@register_layer_budget("lazy-code")
class ReleasedLazyLayerBudget(PublishedLazyLayerBudget):
    """Like `lazy-paper`, but judged by one query, as in the released code (SimLayerKV-decode).

    The released code takes the first decoded query, this rule the prompt's last."""

    judges = 1
