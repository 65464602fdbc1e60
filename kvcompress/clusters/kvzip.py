"""KVzip: what the model needs to repeat its context. https://arxiv.org/abs/2505.23416"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
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

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if view.received is not None:
            return view.received
        return view.window_attention(queries, keys, self.window_size).amax((2, 3))
