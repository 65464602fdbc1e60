"""AdaKV: heads of a layer share one budget. https://arxiv.org/abs/2407.11550"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from ..methods import register_method
from .snapkv import LONGBENCH, WindowKVCluster


@register_method("adakv")
@dataclass(frozen=True)
class AdaKVCluster(WindowKVCluster):
    """SnapKV's scores, ranked over all KV heads of a layer, so that a head whose attention is spread keeps more
    (algorithm 1; window 32, max pooling over 7 keys as in the paper's code). The window stays in every head;
    `safeguard` of the rest is shared out evenly. `head_budget="adaptive"` does the same with the scores of any other
    method. `variant="kvpress"`: each head is sure of its `safeguard` best, the window among them, and the ranking
    decides on all others (`head_budget="adaptive-kvpress"`)."""

    kernel_size: PositiveInt = 7
    pooling: Literal["avg", "max"] = "max"
    variant: Literal["paper", "kvpress"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11550"
    head_budget: ClassVar[str] = "adaptive"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"head_budget": "adaptive-kvpress"}}
    presets: ClassVar[dict[str, dict[str, object]]] = {"longbench": LONGBENCH}
