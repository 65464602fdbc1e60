"""CAKE: tokens whose attention is high or changes, layers whose attention is spread. https://arxiv.org/abs/2503.12491"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat

from ..methods import register_method
from .snapkv import WindowKVCluster


@register_method("cake")
@dataclass(frozen=True)
class CAKEKVCluster(WindowKVCluster):
    """Keeps the observation window and the keys with the highest mean + `gamma` * variance of the window's attention,
    pooled (section 4, eviction indicator; window 32, gamma 200 as published). Layers share the budget by the spread
    and the change of their attention (section 4, layer preferences, `layer_budget="cake"`), temperatures `tau1`
    and `tau2`, which the paper fits per model."""

    gamma: Annotated[float, Field(ge=0)] = 200.0
    tau1: PositiveFloat = 1.0
    tau2: PositiveFloat = 1.0

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.12491"
    layer_budget: ClassVar[str] = "cake"

    def votes(self, weights: torch.Tensor, in_window: torch.Tensor) -> torch.Tensor:
        mean = super().votes(weights, in_window)
        squares = ((weights - mean.unsqueeze(3)) ** 2 * in_window).sum(3)
        return mean + self.gamma * squares / (in_window.sum(3) - 1).clamp(min=1)
