"""AdaMixKV: MixKV's scores in AdaKV's heads, found by a search over parts (docs/own-method.md)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from ..methods import register_method
from .mixkv import MixKVCluster


@register_method("adamixkv")
@dataclass(frozen=True)
class AdaMixKVCluster(MixKVCluster):
    """MixKV's scores, seen from the last four queries and pooled widely (maximum of nine keys), in heads that share a
    layer's budget as AdaKV's do, of which each is sure of half of its even share; more for the first layers
    (`layer_budget="pyramid-effivlm"`), and what is evicted is merged into what follows it (`merge="cam"`). Not from a
    paper: a recipe of published parts, searched for on the bundled tasks."""

    window_size: PositiveInt = 4
    kernel_size: PositiveInt = 9
    pooling: Literal["avg", "max"] = "max"

    paper: ClassVar[str] = ""
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.5
    layer_budget: ClassVar[str] = "pyramid-effivlm"
    merge: ClassVar[str] = "cam"
