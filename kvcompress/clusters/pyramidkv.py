"""PyramidKV: more budget for the lower layers. https://arxiv.org/abs/2406.02069"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from ..budget import pyramid
from .base import Prompt, register_method
from .snapkv import SnapKVCluster


@register_method("pyramidkv")
@dataclass(frozen=True)
class PyramidKVCluster(SnapKVCluster):
    """SnapKV's selection with budgets that fall linearly over the layers (section 3.3); their mean is the budget asked
    for, to the entry. `beta` is the mean over the last layer's budget."""

    beta: Annotated[float, Field(ge=1)] = 20.0

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"

    def layer_budgets(self, prompt: Prompt) -> list[int]:
        return [
            pyramid(budget, length, prompt.num_layers, self.beta, min(self.window_size, budget))[prompt.layer_idx]
            for budget, length in zip(prompt.budgets, prompt.lengths, strict=True)
        ]
