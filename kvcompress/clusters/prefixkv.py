"""PrefixKV: each layer keeps the prefix of its ranking that holds as much attention. https://arxiv.org/abs/2412.03409"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt

from ..methods import register_method
from ..scoring.layer_view import Kept, LayerView
from .base import KVCluster
from .h2o import H2OKVCluster


@register_method("prefixkv")
@dataclass(frozen=True)
class PrefixKVCluster(KVCluster):
    """Keeps the keys with the largest accumulated attention over all queries and heads, the same in all heads, the
    first `sinks` tokens and the last (4 start tokens as in the paper's code).

    Layers share the budget so that each keeps about the same part of its attention (`layer_budget="prefix"`), found for
    each prompt; the paper finds it once, on ten samples, and reuses it. While decoding, what is `distance` entries from
    the end of what was kept of the prompt goes, then what follows it, as in the authors' code (prefixkv.py,
    `selected_idxs`): what is before stays for good, what is behind is a sliding window.
    """

    sinks: NonNegativeInt = 4
    distance: PositiveInt = 25

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.03409"
    layer_budget: ClassVar[str] = "prefix"
    head_budget: ClassVar[str] = "shared"
    decode_interval: ClassVar[int] = 1
    query_window: ClassVar[int] = 0  # `observe` has seen them

    observe = H2OKVCluster.observe

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return self.summed(queries, keys, view) if view.noted is None else self.place(keys, view)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        return super().final_scores(view.protect_sinks(scores, self.sinks), view)

    def note(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """The slot of each head that is emptied from now on."""
        if view.noted is not None:
            return view.noted
        entries = (kept.indices >= 0).sum(2)
        return torch.where(entries > self.distance, entries - self.distance, entries // 2)

    def place(self, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """The later the better; what is before the slot that is emptied stays."""
        place = torch.arange(keys.shape[2], device=keys.device) - view.padding[..., None]
        return place.float().masked_fill(place < view.noted[..., None], float("inf"))
