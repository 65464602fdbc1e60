"""KVzip: what the model needs to repeat its context. https://arxiv.org/abs/2505.23416"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import Prompt
from ..scoring.windows import window_attention
from .base import KVCluster


@register_method("kvzip")
@dataclass(frozen=True)
class KVzipKVCluster(KVCluster):
    """Keeps what a second pass over the context attends to most, over all layers and heads together (sections 3.2 and
    3.3). Asks nothing of the question: meant for `scope="context"`, and for a cache that answers many.

    `instruction`: token ids that precede each chunk of `chunk_size` tokens, such as those of "Repeat the previous
    context:" (none by default: the library has no tokenizer). While decoding, the last `window_size` queries vote.
    """

    chunk_size: PositiveInt = 2048
    instruction: tuple[int, ...] = ()
    window_size: PositiveInt = 32

    paper: ClassVar[str] = "https://arxiv.org/abs/2505.23416"
    second_pass: ClassVar[bool] = True
    layer_budget: ClassVar[str] = "global"
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.0

    @property
    def query_window(self) -> int:
        return self.window_size

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        if prompt.read_again is not None:
            return prompt.read_again
        window = self.window_size
        weights = window_attention(queries, keys, window, prompt.scaling, prompt.padding, prompt.columns, prompt.seen)
        return weights.amax((2, 3))
