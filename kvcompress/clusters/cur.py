"""CurDKV: keys and values with high leverage. https://arxiv.org/abs/2509.15038"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import aligned_left, aligned_right, pad_columns
from .base import KVCluster


@register_method("cur")
@dataclass(frozen=True)
class CURKVCluster(KVCluster):
    """Keeps the sinks and the tokens whose key and value have the largest approximate leverage scores. Uses no queries.

    The leverage of a key or value is its squared norm as a fraction of the sum over its window of `window_size` tokens;
    the two are multiplied (the paper's random projection is left out). Windows are counted from a row's first token;
    `window_size=0` is one window for the whole prompt.
    """

    sinks: NonNegativeInt = 4
    window_size: NonNegativeInt = 16
    leverage: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"

    paper: ClassVar[str] = "https://arxiv.org/abs/2509.15038"
    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        of_keys, of_values = self._leverage(keys, values, view.padding)
        scores = {
            "key": lambda: of_keys,
            "value": lambda: of_values,
            "kv_avg": lambda: (of_keys + of_values) / 2,
            "kv_product": lambda: of_keys * of_values,
        }[self.leverage]()
        scores = scores / scores.sum(-1, keepdim=True)  # makes heads comparable
        scores[..., : self.sinks] = float("inf")
        return aligned_right(scores, view.padding)

    def _leverage(
        self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Return those of keys and of values, each (batch, kv_heads, columns), with each row's first token at column 0
        and zeros at pads."""
        columns = keys.shape[2]
        squares = torch.cat([states.float().square().sum(-1) for states in (keys, values)])
        padding = None if padding is None else padding.repeat(2, 1)
        if padding is not None:
            squares = squares.masked_fill(pad_columns(padding, columns), 0.0)
        window = self.window_size or columns
        windows = F.pad(aligned_left(squares, padding), (0, -columns % window)).unflatten(-1, (-1, window))
        total = windows.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)  # pads have none
        return (windows / total).flatten(2)[..., :columns].chunk(2)
