"""VisPruner: patches that the vision tower attends to, and others that differ. https://arxiv.org/abs/2412.01818"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from ..methods import register_method
from .base import Sees, TokenMethod, Tokens

AT_ONCE = 8  # duplicates dropped before the rest is paired again (llava_arch.py:163)


@register_method("vispruner")
@dataclass(frozen=True)
class VisPruner(TokenMethod):
    """Before the language model, keeps the patches that receive most attention, and others without duplicates.

    `important` of the budget goes to the patches with the most attention in the vision tower's layer `tower_layer`. The
    others lose duplicates round by round until the budget is met: in the order of their attention, every second patch
    is compared with all those in between, by the cosine of their features before the projector, and the eight most
    similar ones are dropped.

    Attention is that of the class token or, in a tower without one, the mean over all patches; several images are
    handled as in `visionzip`.
    """

    important: Annotated[float, Field(ge=0, le=1)] = 0.5
    tower_layer: int = -2

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.01818"
    presets: ClassVar[dict[str, dict[str, object]]] = {  # of 576 tokens
        "128": {"budget": 128, "important": 0.5},
        "64": {"budget": 64, "important": 0.75},
    }
    sees: ClassVar[Sees] = "tower"

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.tower.received

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = scores.clone()
        for row, budget in enumerate(tokens.budgets):
            patches = (scores[row] > float("-inf")).nonzero()[:, 0]  # the others are newlines between lines of patches
            if budget < len(patches):
                order = patches[scores[row, patches].argsort(descending=True, stable=True)]
                important = int(budget * self.important)
                features = F.normalize(tokens.tower.features[row].float(), dim=-1)
                ranks[row, order[:important]] = float("inf")
                ranks[row, distinct(features, order[important:], budget - important)] = float("inf")
        return tokens.best(ranks), tokens.hidden


def distinct(features: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` of the places, dropping duplicates by their features (tokens, size), which have length 1."""
    if not count:
        return places[:0]
    alike = features[places] @ features[places].T  # once: there are many rounds
    left = torch.arange(len(places), device=places.device)
    while (more := len(left) - count) > 0:
        some, others = left[::2], left[1::2]
        order = alike[some[:, None], others].amax(1).argsort(descending=True, stable=True)
        left = torch.cat([some[order[min(AT_ONCE, more) :]], others])
    return places[left]
