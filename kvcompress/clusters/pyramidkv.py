"""PyramidKV: a larger budget for lower layers. https://arxiv.org/abs/2406.02069"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..methods import register_method
from .snapkv import LONGBENCH, SnapKVCluster


@register_method("pyramidkv")
@dataclass(frozen=True)
class PyramidKVCluster(SnapKVCluster):
    """SnapKV's selection with budgets that fall linearly from layer to layer (section 3.3).

    Every layer keeps the window, and `layer_budget="pyramid"` shares out the rest; the mean over the layers is exactly
    the budget that was asked for. With `variant="kvpress"` the whole budget falls, window included
    (`layer_budget="pyramid-kvpress"`); `preset="kvpress"` has kvpress's window of 64 as well. With `variant="effivlm"`
    the window is a tenth of the mean budget, as in EffiVLM-Bench; its layers are `layer_budget="pyramid-effivlm"`.
    """

    variant: Literal["paper", "kvpress", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"
    layer_budget: ClassVar[str] = "pyramid"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {
        **SnapKVCluster.by_variant,
        "kvpress": {"layer_budget": "pyramid-kvpress"},
    }
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "longbench": LONGBENCH,
        "kvpress": {"variant": "kvpress", "window_size": 64},
    }
