"""R-CAKE: R-KV's scores in CAKE's layers, found by a search over parts (docs/own-method.md)."""

from dataclasses import dataclass
from typing import ClassVar

from ..methods import register_method
from .rkv import RKVCluster


@register_method("r-cake")
@dataclass(frozen=True)
class RCakeCluster(RKVCluster):
    """Keeps what R-KV keeps, the last tokens and the keys that are attended to and not said again, but layers share the
    budget by the spread and the change of their attention, as CAKE's do (`layer_budget="cake"`). A long answer is
    compressed every 32 tokens. Not from a paper: a recipe of published parts, searched for on seven tasks."""

    paper: ClassVar[str] = ""
    layer_budget: ClassVar[str] = "cake"
    decode_interval: ClassVar[int] = 32
