"""AdaKV: heads of a layer share one budget. https://arxiv.org/abs/2407.11550"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from ..methods import register_method
from .snapkv import WindowKVCluster


@register_method("adakv")
@dataclass(frozen=True)
class AdaKVCluster(WindowKVCluster):
    """SnapKV's scores, ranked over all KV heads of a layer, so that a head whose attention is spread keeps more
    (algorithm 1; window 32, max pooling over 7 keys as in the paper's code). `head_budget="adaptive"` does the same
    with the scores of any other method; `safeguard` is the share that each head is sure of."""

    kernel_size: PositiveInt = 7
    pooling: Literal["avg", "max"] = "max"

    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11550"
    head_budget: ClassVar[str] = "adaptive"
