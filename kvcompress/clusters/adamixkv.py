"""AdaMixKV: MixKV's scores with AdaKV's head budgets, found by a search."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from ..methods import register_method
from .mixkv import MixKVCluster


@register_method("adamixkv")
@dataclass(frozen=True)
class AdaMixKVCluster(MixKVCluster):
    """MixKV's scores from the last four queries, max-pooled over nine keys, with AdaKV's head budgets.

    Each head is guaranteed half of its even share. The first layers get more (`layer_budget="pyramid-effivlm"`), and
    the values of evicted entries are merged into the entries that follow them (`merge="cam"`). This is not from a
    paper: it is a recipe of published parts, found by a search on the bundled tasks.
    """

    window_size: PositiveInt = 4
    kernel_size: PositiveInt = 9
    pooling: Literal["avg", "max"] = "max"

    paper: ClassVar[str] = ""
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.5
    layer_budget: ClassVar[str] = "pyramid-effivlm"
    merge: ClassVar[str] = "cam"
