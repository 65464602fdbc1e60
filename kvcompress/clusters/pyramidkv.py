"""PyramidKV: more budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from dataclasses import dataclass
from typing import ClassVar

from .base import register_method
from .snapkv import SnapKVCluster


@register_method("pyramidkv")
@dataclass(frozen=True)
class PyramidKVCluster(SnapKVCluster):
    """SnapKV's selection with budgets that fall linearly over the layers (section 3.3, `layer_budget="pyramid"`);
    their mean is the budget asked for, to the entry."""

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"
    layer_budget: ClassVar[str] = "pyramid"
