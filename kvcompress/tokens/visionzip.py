"""VisionZip: the vision tokens that the vision tower itself looks at. https://arxiv.org/abs/2412.04467"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from ..methods import register_method
from .base import TokenMethod, Tokens


@register_method("visionzip")
@dataclass(frozen=True)
class VisionZip(TokenMethod):
    """Before the language model, keeps the dominant tokens, which receive most attention in the vision tower's layer
    `tower_layer` (section 3.2), and `contextual` of the budget for tokens into which the others are merged (section
    3.3): targets at a uniform stride among the rest, to each of which the mean of the tokens is added whose keys,
    averaged over the heads, are most like its own.

    The published budgets of 64, 128 and 192 tokens are 54 + 10, 108 + 20 and 162 + 30. Attention is that of the class
    token or, in a tower without one (SigLIP), the mean of all patches'. Tokens are chosen and merged among all images
    of a row, as the language model is given them; the paper merges in front of the projector.
    """

    contextual: Annotated[float, Field(ge=0, lt=1)] = 10 / 64
    tower_layer: int = -2

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.04467"
    sees: ClassVar[Literal["attention", "tower", "frames"]] = "tower"

    def layers(self, num_layers: int) -> list[int]:
        return [0]

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.tower.received

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        patches = (scores > float("-inf")).sum(1).tolist()  # the others are newlines between lines of patches
        targets = [
            math.floor(self.contextual * budget + 0.5) if budget < count else 0
            for budget, count in zip(tokens.budgets, patches, strict=True)
        ]
        chosen = tokens.best(scores, [n - m for n, m in zip(tokens.budgets, targets, strict=True)])
        hidden = tokens.hidden.clone()
        keys = F.normalize(tokens.tower.keys.float().mean(2), dim=-1)  # (batch, tokens, head_dim)
        for row, count in enumerate(targets):
            if not count:
                continue
            rest = (tokens.vision[row] & ~chosen[row] & (scores[row] > float("-inf"))).nonzero()[:, 0]
            is_target = torch.zeros_like(rest, dtype=torch.bool)
            is_target[torch.arange(count, device=rest.device) * (len(rest) // count)] = True
            target, others = rest[is_target], rest[~is_target]
            nearest = (keys[row, others] @ keys[row, target].T).argmax(1)
            sums = torch.zeros(count, hidden.shape[2], device=hidden.device)
            sums.index_add_(0, nearest, tokens.hidden[row, others].float())
            merged = nearest.bincount(minlength=count).clamp(min=1)[:, None]
            hidden[row, target] += (sums / merged).to(hidden.dtype)
            chosen[row, target] = True
        return chosen, hidden
