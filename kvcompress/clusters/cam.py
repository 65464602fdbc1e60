"""CaM: heavy hitters that take over the values of what is evicted. https://proceedings.mlr.press/v235/zhang24n.html"""

from dataclasses import dataclass
from typing import ClassVar

from ..methods import register_method
from .h2o import HeavyHitterKVCluster


@register_method("cam")
@dataclass(frozen=True)
class CaMKVCluster(HeavyHitterKVCluster):
    """H2O's selection; an evicted entry's value is shared out among the kept entries that follow it, the more likely
    the more attention it had beside them (section 4, `merge="cam"`)."""

    paper: ClassVar[str] = "https://proceedings.mlr.press/v235/zhang24n.html"
    merge: ClassVar[str] = "cam"
