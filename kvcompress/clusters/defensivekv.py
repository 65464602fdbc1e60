"""DefensiveKV: the worst case over queries, not their mean. https://arxiv.org/abs/2510.13334"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..device import on_device
from ..methods import register_method
from ..scoring.heads import over_heads
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import ranks
from ..scoring.windows import pool_scores
from .criticalkv import projected_norm
from .snapkv import WindowKVCluster

ALL = 1 - 1e-6  # of the attention: the sum of all weights is 1 up to rounding, which differs in a batch


@register_method("defensivekv")
@dataclass(frozen=True)
class DefensiveKVCluster(WindowKVCluster):
    """Keeps the observation window and the keys that would be missed most in the worst case (defensive aggregation).

    A key's risk is the largest pooled weight that any query of the window, in any query head of the KV head, gives it;
    pooling leaves each query's total as it was. A prior lifts every risk to at least the head's mean risk. As in
    CriticalKV, risks are multiplied by the norm of the projected value, and the keys that hold `mass` of a head's mean
    attention are kept first, as far as the even share of the budget goes. All heads of a layer share its budget.

    `preset=layer` is Layer-DefensiveKV, which ranks the keys of all layers together.
    """

    mass: Annotated[float, Field(ge=0, le=1)] = 0.9

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.13334"
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.0
    mixes_heads: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, object]]] = {"layer": {"layer_budget": "global"}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        columns, window = keys.shape[2], min(self.window_size, keys.shape[2])
        real = view.real_columns(keys)
        in_window = torch.arange(columns, device=keys.device) >= columns - window
        older = real & ~in_window
        weights = view.window_attention(queries, keys, window)
        asking = (weights.sum(-1) > 0).sum((1, 2, 3)).clamp(min=1)  # a pad's query, after a second prompt, sees no key
        weights = weights * older[:, :, None, None]

        pooled = pool_scores(weights, self.kernel_size, self.pooling) * older[:, :, None, None]
        pooled *= (weights.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True)).nan_to_num(0.0)  # NaN: a pad's query
        risk = pooled.amax((2, 3))  # (batch, kv_heads, keys)
        risk = risk.maximum(risk.sum(-1, keepdim=True) / older.sum(-1, keepdim=True))

        norms = projected_norm(values, view, "defensivekv").masked_fill(~real, 0.0)
        norms = norms / over_heads(norms, view).clamp(min=torch.finfo(norms.dtype).tiny)
        scores = (risk * norms).masked_fill(~older, 0.0)
        # The window and the sure keys tie with the layer's best: over several layers they are not above all others.
        best = scores.amax((1, 2), keepdim=True)
        sure = self.sure(weights, window, asking, view) | in_window
        return torch.where(sure, best, scores)

    def sure(self, weights: torch.Tensor, window: int, asking: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return bool (batch, kv_heads, keys): the keys that together hold `mass` of the window's mean attention.

        `weights` is (batch, kv_heads, groups, queries, keys), zero in the window, and `asking` (batch,) counts its
        queries in all heads. As in the authors' code, what the keys just before the window hold, as many as it has, is
        first taken off `mass`."""
        columns = weights.shape[4]
        before = weights[..., max(columns - 2 * window, 0) : columns - window].sum(-1).sum((1, 2, 3)) / asking
        attention = weights.mean((2, 3))
        held = (attention / attention.sum(-1, keepdim=True)).sort(-1, descending=True).values.cumsum(-1)
        mass = (self.mass - before).clamp(max=ALL)
        count = (held < mass[:, None, None]).sum(-1)
        room = [
            budget * (length - window) // max(length, 1) - window
            for budget, length in zip(view.budgets, view.lengths, strict=True)
        ]
        count = count.minimum(on_device(room, weights.device)[:, None])
        return ranks(attention, view.padding) < count[..., None]
