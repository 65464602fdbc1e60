"""MEDA: layers with spread attention keep more. https://arxiv.org/abs/2502.17599"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import text_first
from .h2o import HeavyHitterKVCluster


@register_method("meda")
@dataclass(frozen=True)
class MEDAKVCluster(HeavyHitterKVCluster):
    """Keeps recent tokens and those with the largest accumulated attention, text before vision.

    `recent` of a layer's budget goes to recent tokens. Evicted entries are merged into kept ones, which become their
    mean. Layers share the budget by the entropy of their attention (`layer_budget="attention-entropy"`). This is what
    the authors' scripts run (modify_llama.py, AttnEntropyTextAVGMergeKVCache_LayerWise). `variant="paper"` shares by
    cross-modal entropy (`layer_budget="entropy"`) and merges each entry half and half into the one with the most
    similar key (`merge="pivot"`).

    `merge="meda"` averages exactly as the code does. The code finds the evicted entries that are more similar to a kept
    one than the mean, and then merges equally many, but the first ones, into the kept entries that it found.
    `merge="average"` merges every entry into the most similar one. The authors' code keeps all text, and if half of a
    layer's budget is smaller than the text, it keeps 100 more recent tokens than there is text, on top of the budget.
    Here nothing comes on top: if text alone exceeds the budget, text is ranked by its attention. While decoding, all
    tokens count as text.
    """

    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.17599"
    layer_budget: ClassVar[str] = "attention-entropy"
    merge: ClassVar[str] = "meda"
    by_variant: ClassVar = {"paper": {"layer_budget": "entropy", "merge": "pivot"}}
    decode_interval: ClassVar[int] = 16

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return text_first(self.summed(queries, keys, view), view)
