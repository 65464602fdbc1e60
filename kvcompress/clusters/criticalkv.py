"""CriticalKV: attention weighted by how much a value changes the output. https://arxiv.org/abs/2502.03805"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..device import on_device
from ..methods import register_method
from ..scoring.layer_view import Kept, LayerView
from ..scoring.projection import output_projection
from ..scoring.selection import ADAPTIVE, ranks
from .snapkv import WindowKVCluster

BLOCK = 256  # keys projected at a time


def projected_norm(values: torch.Tensor, view: LayerView, method: str) -> torch.Tensor:
    """Return the L1 norm of each value after the output projection, averaged over the query heads of a KV head.

    Args:
        values: (batch, kv_heads, keys, head_dim).
        view: of the layer; the weight of its module's `o_proj` is (hidden, heads * head_dim).
        method: the method that asks, for the error if there is no such weight.

    Returns:
        (batch, kv_heads, keys) in fp32.
    """
    norms = []
    for part, module in view.by_module(values):
        weight = output_projection(module, values.shape[1], values.shape[3], method)
        blocks = [
            torch.stack([(block.float() @ of_group).abs().sum(-1) for of_group in weight]).mean(0)
            for block in part.split(BLOCK, dim=2)
        ]
        norms.append(torch.cat(blocks, dim=-1))
    return torch.cat(norms)


@register_method("criticalkv")
@dataclass(frozen=True)
class CriticalKVCluster(WindowKVCluster):
    """Selects by SnapKV's scores in two stages (algorithm 1).

    `first_stage` of a head's budget goes to the highest scores, the rest to the highest (score + epsilon) * ||W_o
    v||_1, which bounds how much the output changes when the entry is dropped (theorem 3.3). With
    `head_budget="adaptive"` the heads' budgets depend on the scores alone.
    """

    first_stage: Annotated[float, Field(ge=0, le=1)] = 0.5
    epsilon: Annotated[float, Field(ge=0)] = 1e-4

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.03805"
    fills_budget: ClassVar[bool] = True

    def keep(self, scores: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        budgets = on_device(view.budgets, keys.device)[:, None].expand(scores.shape[:2])
        scores = self.final_scores(scores, view)
        head_budget = view.settings.head_budget or self.head_budget
        safe = (view.settings.safeguard * budgets.float()).long() if head_budget == "adaptive-kvpress" else 0
        if head_budget in ADAPTIVE:
            budgets = (self.select(scores, view) >= 0).sum(-1)
        first = (self.first_stage * budgets.float()).long().clamp(min=safe)
        sure = ranks(scores, view.padding) < first[..., None]
        weighted = (scores + self.epsilon) * projected_norm(values, view, "criticalkv")
        largest = torch.finfo(scores.dtype).max
        weighted = torch.where(sure | (scores >= largest), torch.inf, weighted)
        if head_budget in ADAPTIVE:
            chosen = ranks(weighted, view.padding) < budgets[..., None]
            weighted = torch.where(chosen, torch.inf, weighted.clamp(max=largest / 2))
        return super().keep(weighted, keys, values, view)
