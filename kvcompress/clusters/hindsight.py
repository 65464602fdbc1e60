"""Hindsight: the entries that the answer will need. A yardstick for other methods, not one to deploy."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.answer import Answer, attention_mass, output_error
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("hindsight")
@dataclass(frozen=True)
class HindsightKVCluster(KVCluster):
    """Keeps, per layer and KV head, the entries that the full cache's own answer needs.

    The answer is first generated greedily from the whole prompt. Its queries, and that of the prompt's last token, then
    choose the entries.

    With `by="attention"`, these are the entries with the largest sum of attention weights over these queries. With
    `by="output"`, they are the entries whose removal would change the head's output most, after the output projection:
    the squared error when one entry is left out and the other weights are renormalised, summed over the queries.
    `answer_tokens` is the number of answer tokens to look ahead; the answer may end earlier. Evictions while decoding
    do not look ahead: the last `window_size` queries choose.
    """

    by: Literal["attention", "output"] = "attention"
    answer_tokens: PositiveInt = 32
    window_size: PositiveInt = 32

    second_pass: ClassVar[str] = "answer"

    def score_by_answer(self, answer: Answer) -> torch.Tensor:
        """Score each key by what the answer needs of it: (batch, kv_heads, keys) in fp32."""
        return attention_mass(answer) if self.by == "attention" else output_error(answer)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.received is not None:
            return view.received
        return view.window_attention(queries, keys, self.window_size).sum(3).mean(2)
