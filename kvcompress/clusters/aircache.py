"""AirCache: vision tokens that the most relevant words attend to. https://arxiv.org/abs/2503.23956"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.vision import DECODED_QUERIES, elite_attention, question_attention, text_first
from .base import KVCluster


@register_method("aircache")
@dataclass(frozen=True)
class AirCacheKVCluster(KVCluster):
    """Evicts only vision tokens, those that the elite queries attend to least.

    The elite queries (elite observation window) are chosen among the tokens after the last image: the last token
    attends to these tokens alone, and those that get at least `alpha` of its largest weight are elite. Layers share the
    vision budget by the strength and skewness of the elite queries' attention (`layer_budget="strength"`).

    The paper's budget counts vision tokens, as `ratio_of="vision"` does. If text alone exceeds the budget, text is
    ranked by the elite queries' attention. While decoding, all recent queries are elite.
    """

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.9

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.23956"
    whole_prompt: ClassVar[bool] = True
    mixes_heads: ClassVar[bool] = True
    layer_budget: ClassVar[str] = "strength"
    query_window: ClassVar[int] = DECODED_QUERIES

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.is_decoding:
            return question_attention(queries, keys, view)
        return text_first(elite_attention(queries, keys, view, self.alpha), view)
