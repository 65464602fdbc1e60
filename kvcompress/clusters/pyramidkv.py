"""PyramidKV: more budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from dataclasses import dataclass
from typing import ClassVar

from ..methods import register_method
from .snapkv import SnapKVCluster


@register_method("pyramidkv")
@dataclass(frozen=True)
class PyramidKVCluster(SnapKVCluster):
    """SnapKV's selection with budgets that fall linearly over the layers (section 3.3, `layer_budget="pyramid"`);
    their mean is the budget asked for, to the entry. `variant="effivlm"` has EffiVLM-Bench's window, a tenth of the
    mean budget; its layers, the window besides the pyramid, are `layer_budget="pyramid-effivlm"`."""

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"
    layer_budget: ClassVar[str] = "pyramid"
