"""VisionZip: vision tokens that the vision tower itself attends to. https://arxiv.org/abs/2412.04467"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from ..methods import register_method
from .base import Sees, TokenMethod, Tokens, Tower


@register_method("visionzip")
@dataclass(frozen=True)
class VisionZip(TokenMethod):
    """Before the language model, keeps dominant tokens and contextual ones, into which the others are merged.

    Dominant tokens receive the most attention in the vision tower's layer `tower_layer` (section 3.2). Contextual
    tokens get `contextual` of the budget: they are targets at a uniform stride among the rest. To each is added the
    mean of the tokens whose keys, averaged over the heads, are most similar to its own (section 3.3).

    Attention is that of the class token or, in a tower without one (SigLIP), the mean over all patches. A tile's class
    token is itself the first of its dominant tokens, as in the released code: the published budgets of 64, 128 and 192
    tokens are 54 + 10, 108 + 20 and 162 + 30, of which 53, 107 and 161 are patches. It takes the position of a dropped
    patch, and it is left out if it would be the only dominant token. Merging happens before the projector.

    Tokens are chosen and merged among all images of a row, as the language model gets them; the released code treats
    each tile separately.
    """

    contextual: Annotated[float, Field(ge=0, lt=1)] = 10 / 64
    tower_layer: int = -2

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.04467"
    presets: ClassVar[dict[str, dict[str, object]]] = {  # of 576 tokens, dominant + contextual
        "192": {"budget": 192, "contextual": 30 / 192},
        "128": {"budget": 128, "contextual": 20 / 128},
        "64": {"budget": 64, "contextual": 10 / 64},
    }
    sees: ClassVar[Sees] = "tower"

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.tower.received

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        is_patch = scores > float("-inf")  # the others are newlines between lines of patches
        sizes = []
        for budget, patches, classes in zip(
            tokens.budgets, is_patch.sum(1).tolist(), tokens.tower.classes, strict=True
        ):
            targets = math.floor(self.contextual * budget + 0.5) if budget < patches else 0
            dominant = budget - targets
            sizes.append((dominant, targets, len(classes) if len(classes) < dominant and budget < patches else 0))
        chosen = tokens.best(scores, [dominant - classes for dominant, _, classes in sizes])
        hidden = tokens.hidden.clone()
        for row, (_, targets, classes) in enumerate(sizes):
            rest = (tokens.vision[row] & ~chosen[row] & is_patch[row]).nonzero()[:, 0]
            is_target = torch.zeros_like(rest, dtype=torch.bool)
            if targets:
                is_target[torch.arange(targets, device=rest.device) * (len(rest) // targets)] = True
                hidden[row, rest[is_target]] = self._merged(tokens.tower, row, rest[is_target], rest[~is_target]).to(
                    hidden
                )
            places = rest[~is_target][:classes]
            hidden[row, places] = tokens.tower.project(tokens.tower.classes[row][:classes]).to(hidden)
            chosen[row, rest[is_target]] = chosen[row, places] = True
        return chosen, hidden

    def _merged(self, tower: Tower, row: int, targets: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the targets' states (targets, hidden_size) plus the mean of the other tokens most similar to each."""
        keys, features = F.normalize(tower.keys[row].float().mean(1), dim=-1), tower.features[row].float()
        nearest = (keys[others] @ keys[targets].T).argmax(1)
        sums = torch.zeros_like(features[targets]).index_add_(0, nearest, features[others])
        count = nearest.bincount(minlength=len(targets)).clamp(min=1)[:, None]
        return tower.project((features[targets] + sums / count).to(tower.features.dtype))
