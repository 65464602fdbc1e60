"""MorphKV: tokens that recent tokens attend to, chosen again at every step. https://arxiv.org/abs/2503.00979"""

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
    """Keeps the last `window_size` tokens and the older tokens that these attend to most.

    `fusion` combines the window's queries: the largest weight (max fusion) or their sum (sum fusion, section 3). The
    method is made for long answers: with `decode_budget=` it chooses again at every step, and the cache never grows.

    The softmax of a window query covers only the older tokens, and a KV head's query heads add their logits, as in the
    authors' code. The presets `longgenbench`, `longwriter` and `longbench` are the settings in its README.
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
        weights = logits.softmax(-1).nan_to_num(0.0)  # NaN: a pad's query, or no token before the window
        votes = weights.amax(2) if self.fusion == "max" else weights.sum(2)
        return view.protect_recent(votes, window)
