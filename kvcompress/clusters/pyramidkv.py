"""PyramidKV: more budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..methods import register_method
from .snapkv import LONGBENCH, SnapKVCluster


@register_method("pyramidkv")
@dataclass(frozen=True)
class PyramidKVCluster(SnapKVCluster):
    """SnapKV's selection with budgets that fall linearly over the layers (section 3.3): every layer keeps the window,
    `layer_budget="pyramid"` shares out the rest; the mean is the budget asked for, to the entry. `variant="kvpress"`
    lets the whole budget fall, the window inside it (`layer_budget="pyramid-kvpress"`). `variant="effivlm"` has
    EffiVLM-Bench's window, a tenth of the mean budget; its layers are `layer_budget="pyramid-effivlm"`."""

    variant: Literal["paper", "kvpress", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"
    layer_budget: ClassVar[str] = "pyramid"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {
        **SnapKVCluster.by_variant,
        "kvpress": {"layer_budget": "pyramid-kvpress"},
    }
    presets: ClassVar[dict[str, dict[str, object]]] = {"longbench": LONGBENCH}
