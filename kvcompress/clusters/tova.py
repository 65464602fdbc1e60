"""TOVA: token omission via attention. https://arxiv.org/abs/2401.06104"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("tova")
@dataclass(frozen=True)
class TOVAKVCluster(KVCluster):
    """Keeps the tokens that the last query attends to most, averaged over all heads (section 3.2).

    All heads of a layer therefore keep the same tokens. While decoding, the size is fixed: every step drops one token,
    which may be the new one. With `variant="kvpress"` the last token always stays.
    """

    variant: Literal["code", "kvpress"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"
    head_budget: ClassVar[str] = "shared"
    decode_interval: ClassVar[int] = 1
    query_window: ClassVar[int] = 1
    keeps_last: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"keeps_last": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        weights = view.window_attention(queries, keys, 1)
        scores = weights[..., 0, :].mean(2)  # (batch, kv_heads, keys)
        if self.of_variant("keeps_last"):
            scores[..., -1:] = float("inf")
        return scores
