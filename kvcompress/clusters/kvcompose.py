"""KVCompose: each head ranks its own tokens; layers compete by composite tokens. https://arxiv.org/abs/2509.05165"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.heads import over_heads
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("kvcompose")
@dataclass(frozen=True)
class KVComposeKVCluster(KVCluster):
    """Keeps the tokens that a second reading of the whole prompt attends to most.

    A token's score is the largest weight that any query gives it, averaged over a KV head's query heads, plus the mean
    of these scores over the layer's KV heads. Each KV head ranks its own tokens; tokens of equal rank form a composite
    token, whose score is their mean. The composite tokens of all layers compete for the budget
    (`layer_budget="composite"`). The heads of a layer thus keep equally many tokens, but not the same ones.

    With `layer_budget="global"`, `head_budget="adaptive"` and `safeguard=0` it is the paper's unstructured form. While
    decoding, the last `window_size` queries vote.
    """

    window_size: PositiveInt = 32

    paper: ClassVar[str] = "https://arxiv.org/abs/2509.05165"
    layer_budget: ClassVar[str] = "composite"
    mixes_heads: ClassVar[bool] = True
    second_pass: ClassVar[str] = "context"
    group_votes: ClassVar[str] = "mean"
    # The second pass reads the prompt in one piece, from its first token.
    chunk_size: ClassVar[int] = sys.maxsize
    sinks: ClassVar[int] = 0
    instruction: ClassVar[tuple[int, ...]] = ()

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = view.received
        if scores is None:
            scores = view.window_attention(queries, keys, self.window_size).amax(3).mean(2)
        return scores + over_heads(scores, view) / scores.shape[1]
