"""AdaKV: the heads of a layer share one budget. https://arxiv.org/abs/2407.11550"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from ..methods import register_method
from .snapkv import LONGBENCH, WindowKVCluster


@register_method("adakv")
@dataclass(frozen=True)
class AdaKVCluster(WindowKVCluster):
    """Ranks SnapKV's scores over all KV heads of a layer, so heads with spread attention keep more (algorithm 1).

    Every head keeps the window, and `safeguard` of the rest is shared out evenly. Window 32 and max pooling over 7 keys
    are the settings of the paper's code. `head_budget="adaptive"` does the same with the scores of any other method.
    With `variant="kvpress"` each head is guaranteed its `safeguard` best entries, window included, and the ranking
    decides on all others (`head_budget="adaptive-kvpress"`); `preset="kvpress"` has its window and pooling as well.
    """

    kernel_size: PositiveInt = 7
    pooling: Literal["avg", "max"] = "max"
    variant: Literal["paper", "kvpress"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11550"
    head_budget: ClassVar[str] = "adaptive"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"head_budget": "adaptive-kvpress"}}
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "longbench": LONGBENCH,
        "kvpress": {"variant": "kvpress", "window_size": 64, "kernel_size": 5, "pooling": "avg"},
    }
