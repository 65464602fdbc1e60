"""CaM: sinks and recent tokens, into which the values of evicted tokens are merged.
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
    """Keeps the first tokens and the most recent ones, which get `recent` of the budget (half as published).

    The value of an evicted token is added in equal parts to the values of the `followers` tokens after it. The more
    attention it received compared with them, the likelier it is to be merged (section 4, `merge="cam"`).
    """

    followers: PositiveInt = FOLLOWERS

    paper: ClassVar[str] = "https://proceedings.mlr.press/v235/zhang24n.html"
    merge: ClassVar[str] = "cam"

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        # Sums decide what is merged, positions decide what is kept: the recent tokens first, then the row's first ones.
        return super().final_scores(sinks_and_recent(scores, scores.shape[2], view.padding), view)
