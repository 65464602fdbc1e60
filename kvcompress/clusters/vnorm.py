"""Value norm: a token with a large value contributes more to the output, whichever query attends to it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster


@register_method("vnorm")
@dataclass(frozen=True)
class VNormKVCluster(KVCluster):
    """Keeps the values with the largest L1 norm.

    This is the part of VATP's score (https://arxiv.org/abs/2406.12335, eq. 3; guozhiyu/vatp, utils_hh/modify_llama.py)
    that needs no attention. `variant="kvpress"` uses the L2 norm, as kvpress's CUR does in its value mode.
    """

    variant: Literal["code", "kvpress"] = "code"

    query_window: ClassVar[int] = 0  # asks no query
    norm: ClassVar[int] = 1
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"norm": 2}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return values.float().norm(p=self.of_variant("norm"), dim=-1)
