"""CAKE: tokens with high or changing attention, layers with spread attention. https://arxiv.org/abs/2503.12491"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .snapkv import WindowKVCluster


@register_method("cake")
@dataclass(frozen=True)
class CAKEKVCluster(WindowKVCluster):
    """Keeps the observation window and the keys with the highest mean + `gamma` * variance of the window's attention.

    This eviction indicator is pooled (section 4; window 32, gamma 200 as published). Layers share the budget by how
    spread and how changeable their attention is (section 4, layer preferences, `layer_budget="cake"`), with
    temperatures `tau1` and `tau2`. The paper fits these per model and cache size (presets, from model2tau.json of its
    code).

    While decoding (`decode_budget=`, the cache size in the presets), the latest query's attention alone decides at each
    step, and layers keep the shares that the prompt gave them.
    """

    gamma: Annotated[float, Field(ge=0)] = 200.0
    tau1: PositiveFloat = 1.0
    tau2: PositiveFloat = 1.0

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.12491"
    layer_budget: ClassVar[str] = "cake"
    decode_interval: ClassVar[int] = 1
    presets: ClassVar[dict[str, dict[str, object]]] = {
        f"{model}-{size}": {"tau1": tau1, "tau2": tau2, "budget": size, "decode_budget": size}
        for model, size, tau1, tau2 in (
            ("llama-2-7b", 128, 0.9, 2.3),
            ("llama-2-7b", 1024, 1.9, 1.8),
            ("llama-2-13b", 128, 1.8, 2.0),
            ("llama-2-13b", 1024, 0.5, 0.4),
            ("llama-3.1-8b", 128, 1.6, 0.6),
            ("llama-3.1-8b", 1024, 1.6, 0.4),
            ("mistral-0.3-7b", 128, 1.0, 0.8),
            ("mistral-0.3-7b", 1024, 0.8, 0.5),
            ("qwen2.5-7b", 128, 0.4, 0.6),
            ("qwen2.5-7b", 1024, 1.5, 0.6),
        )
    }

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.is_decoding and not view.stored.reading:
            queries = queries[:, :, -1:]
        return super().score(queries, keys, values, view)

    def votes(self, weights: torch.Tensor, in_window: torch.Tensor) -> torch.Tensor:
        mean = super().votes(weights, in_window)
        squares = (weights - mean.unsqueeze(3)) ** 2
        if in_window is None:
            return mean + self.gamma * squares.sum(3) / max(weights.shape[3] - 1, 1)
        return mean + self.gamma * (squares * in_window).sum(3) / (in_window.sum(3) - 1).clamp(min=1)
