"""Value norm: a token whose value is long weighs more in the output, whoever attends to it."""

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
    """Keeps the values with the largest L1 norm: the part of VATP's score (https://arxiv.org/abs/2406.12335, eq. 3;
    guozhiyu/vatp, utils_hh/modify_llama.py) that needs no attention. `variant="kvpress"`: the L2 norm, as in the value
    mode of its CUR."""

    variant: Literal["code", "kvpress"] = "code"

    query_window: ClassVar[int] = 0  # asks no query
    norm: ClassVar[int] = 1
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"norm": 2}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return values.float().norm(p=self.of_variant("norm"), dim=-1)
