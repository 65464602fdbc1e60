"""LOOK-M: text first, and evicted entries merged into kept ones. https://arxiv.org/abs/2406.18139"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import text_first
from .h2o import HeavyHitterKVCluster


@register_method("look-m")
@dataclass(frozen=True)
class LookMKVCluster(HeavyHitterKVCluster):
    """Keeps recent tokens and those with the largest accumulated attention, text before vision (section 3.2).

    Each evicted entry is merged into the kept entry with the most similar key (section 3.3). The default is pivotal
    merging, the best of the paper's three; `merge=` selects another, and `merge_modality=same` keeps text and vision
    apart.

    `recent` is the part of the budget for recent tokens, half as published; `variant="effivlm"` uses EffiVLM-Bench's
    tenth. If text alone exceeds the budget, text is ranked by its attention. While decoding, all tokens count as text.
    """

    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.18139"
    merge: ClassVar[str] = "pivot"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"effivlm": {"recent_tenth": True}}
    decode_interval: ClassVar[int] = 16

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return text_first(self.summed(queries, keys, view), view)
