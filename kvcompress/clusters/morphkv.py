"""MorphKV: what recent tokens attend to, chosen anew at every step. https://arxiv.org/abs/2503.00979"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("morphkv")
@dataclass(frozen=True)
class MorphKVCluster(KVCluster):
    """Keeps the last `window_size` tokens and, of the older ones, those that any of them attends to most, or all of
    them together (`fusion`, section 3: max and sum fusion). Made for long answers: with `decode_budget=` the choice is
    made anew at every step, and the cache never grows.

    A window's query gives its attention to the older tokens alone; a KV head's query heads add their logits, as in the
    authors' code. Its defaults: presets `longgenbench`, `longwriter` and `longbench`, from its README.
    """

    window_size: PositiveInt = 32
    fusion: Literal["max", "sum"] = "max"

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.00979"
    decode_interval: ClassVar[int] = 1
    presets: ClassVar[dict[str, dict[str, object]]] = {
        name: {"window_size": window, "fusion": fusion, "budget": budget, "decode_budget": budget}
        for name, window, fusion, budget in (
            ("longgenbench", 200, "max", 4000),
            ("longwriter", 30, "sum", 600),
            ("longbench", 32, "sum", 2000),
        )
    }

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        window = min(self.window_size, keys.shape[2])
        logits = view.window_logits(queries, keys, window).sum(2)  # (batch, kv_heads, window, keys)
        logits[..., -window:] = -torch.inf
        weights = logits.softmax(-1).nan_to_num(0.0)  # NaN: a pad's query, or nothing before the window
        votes = weights.amax(2) if self.fusion == "max" else weights.sum(2)
        return view.protect_recent(votes, window)
