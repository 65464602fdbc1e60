"""Hindsight: what the answer is going to need. A ruler for the other methods, not one to deploy."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.looking_ahead import Answer, attention_mass, output_error
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("hindsight")
@dataclass(frozen=True)
class HindsightKVCluster(KVCluster):
    """Keeps, per layer and KV head, what the full cache's own answer needs. The answer is generated first, greedily and
    on the whole prompt; its queries, and that of the prompt's last token, then choose.

    `by="attention"`: the entries with the largest sum of attention weights over these queries. `by="output"`: those
    without which a head's output, behind its part of the output projection, would move most: the squared error where
    one entry is left out and the others are weighted anew, summed over the queries. `answer_tokens`: how many tokens of
    the answer are foreseen, fewer where it ends before. What is decoded later is chosen by its last `window_size`
    queries: nothing is foreseen then.
    """

    by: Literal["attention", "output"] = "attention"
    answer_tokens: PositiveInt = 32
    window_size: PositiveInt = 32

    second_pass: ClassVar[str] = "answer"

    def foresee(self, answer: Answer) -> torch.Tensor:
        """What each key is worth to the answer, (batch, kv_heads, keys) in fp32."""
        return attention_mass(answer) if self.by == "attention" else output_error(answer)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.received is not None:
            return view.received
        return view.window_attention(queries, keys, self.window_size).sum(3).mean(2)
