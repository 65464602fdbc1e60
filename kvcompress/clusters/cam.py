"""CaM: sinks and recent tokens, which take over values of what is evicted.
https://proceedings.mlr.press/v235/zhang24n.html"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.merging import FOLLOWERS
from .h2o import HeavyHitterKVCluster
from .streamingllm import sinks_and_recent


@register_method("cam")
@dataclass(frozen=True)
class CaMKVCluster(HeavyHitterKVCluster):
    """Keeps the first tokens and the most recent ones, `recent` of the budget for these (half and half in the
    published runs). The value of a token that leaves is added in equal parts to the values of the `followers` tokens
    behind it, the more likely the more attention it had beside them (section 4, `merge="cam"`)."""

    followers: PositiveInt = FOLLOWERS

    paper: ClassVar[str] = "https://proceedings.mlr.press/v235/zhang24n.html"
    merge: ClassVar[str] = "cam"

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        # Sums decide what is merged, positions what is kept: the recent tokens first, then the row's first ones.
        return super().final_scores(sinks_and_recent(scores, scores.shape[2], view.padding), view)
