"""KVzip: the entries that the model needs to repeat its context. https://arxiv.org/abs/2505.23416"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("kvzip")
@dataclass(frozen=True)
class KVzipKVCluster(KVCluster):
    """Keeps the entries that a second pass over the context attends to most (sections 3.2 and 3.3).

    Entries of all layers and heads compete. The method does not look at the question: it is meant for `scope="context"`
    and for a cache that answers many questions.

    The first `sinks` tokens, which take the place of the code's system prompt, stay, and every chunk is scored next to
    them. They are part of what `ratio` keeps. With `variant="code"`, `ratio` counts only the tokens after them and they
    stay on top, so a prompt keeps more than `ratio`; `budget`, `decode_ratio` and `decode_budget` count them either
    way. `instruction` holds token ids that precede each chunk of `chunk_size` tokens, such as those of "Repeat the
    previous context:" (none by default: the library has no tokenizer). While decoding, the last `window_size` queries
    vote.
    """

    chunk_size: PositiveInt = 2000
    sinks: NonNegativeInt = 4
    instruction: tuple[int, ...] = ()
    window_size: PositiveInt = 32
    variant: Literal["budget", "code"] = "budget"

    paper: ClassVar[str] = "https://arxiv.org/abs/2505.23416"
    second_pass: ClassVar[str] = "context"
    layer_budget: ClassVar[str] = "global"
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.0
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"code": {"sinks_on_top": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = view.received
        if scores is None:
            scores = view.window_attention(queries, keys, self.window_size).amax((2, 3))
        return scores.masked_fill(view.positions(keys) < self.sinks, float("inf"))
