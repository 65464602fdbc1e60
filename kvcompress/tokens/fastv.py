"""FastV: an image is worth half its tokens after layer 2. https://arxiv.org/abs/2403.06764"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..methods import register_method
from .base import TokenMethod, Tokens, checked_layer


@register_method("fastv")
@dataclass(frozen=True)
class FastV(TokenMethod):
    """From decoder layer `layer` (K) on, keeps the vision tokens that the prompt's last token attends to most.

    Attention is that of the previous layer, averaged over its heads (section 4.1, ranked as in the released code).
    Earlier layers process and cache all tokens. `ratio` is the paper's 1 - R; it recommends K = 2, R = 0.5."""

    layer: PositiveInt = 2

    paper: ClassVar[str] = "https://arxiv.org/abs/2403.06764"
    presets: ClassVar[dict[str, dict[str, object]]] = {
        f"k2-r{percent}": {"layer": 2, "ratio": 1 - percent / 100} for percent in (25, 50, 75)
    }

    def layers(self, num_layers: int) -> list[int]:
        return [checked_layer("fastv", self.layer, num_layers)]

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.last_attention()
