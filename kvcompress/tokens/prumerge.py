"""LLaVA-PruMerge+: outliers of the vision tower's attention and an even sample. https://arxiv.org/abs/2403.15388"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt

from ..methods import register_method
from .base import TokenMethod, Tokens


@register_method("prumerge+")
@dataclass(frozen=True)
class PruMergePlus(TokenMethod):
    """Before the language model, keeps the tokens whose attention in the vision tower's layer `tower_layer` is an
    outlier, above Q3 + 1.5 IQR (section 3.2), fills the budget with tokens at an even distance among the others
    (section 3.4), and adds to each kept token its `neighbours` nearest by their keys, weighted by attention (section
    3.3, unnormalised as in the released code).

    The paper lets the outliers set the number of tokens; here it is the budget's, and of more outliers the highest
    stay. Its one extra token, the weighted sum of what is dropped, is left out. Attention, several images and the
    place of merging are as in `visionzip`.
    """

    neighbours: NonNegativeInt = 32
    tower_layer: int = -1

    paper: ClassVar[str] = "https://arxiv.org/abs/2403.15388"
    sees: ClassVar[Literal["attention", "tower", "frames"]] = "tower"

    def layers(self, num_layers: int) -> list[int]:
        return [0]

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.tower.received

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ranks, hidden = scores.clone(), tokens.hidden.clone()
        for row, budget in enumerate(tokens.budgets):
            patches = (scores[row] > float("-inf")).nonzero()[:, 0]  # not the newlines between lines of patches
            if budget < len(patches):
                ranks[row, self._spread(scores[row], patches, budget)] = float("inf")
        chosen = tokens.best(ranks)
        for row in range(len(scores)):
            patches = (scores[row] > float("-inf")).nonzero()[:, 0]
            kept = (chosen[row] & (scores[row] > float("-inf"))).nonzero()[:, 0]
            if len(kept) and len(patches) > 1:
                hidden[row, kept] += self._nearest(scores[row], patches, kept, tokens, row).to(hidden.dtype)
        return chosen, hidden

    def _spread(self, attention: torch.Tensor, patches: torch.Tensor, budget: int) -> torch.Tensor:
        """Columns of the outliers, and of as many others at even distances as the budget has left."""
        weights = attention[patches]
        low, high = torch.quantile(weights, torch.tensor([0.25, 0.75], device=weights.device))
        outliers = min(int((weights > high + 1.5 * (high - low)).sum()), budget)
        first = weights.topk(outliers).indices
        others = torch.ones_like(patches, dtype=torch.bool)
        others[first] = False
        rest, wanted = patches[others], budget - outliers
        even = torch.arange(wanted, device=patches.device) * len(rest) // max(wanted, 1)
        return torch.cat([patches[first], rest[even]])

    def _nearest(
        self, attention: torch.Tensor, patches: torch.Tensor, kept: torch.Tensor, tokens: Tokens, row: int
    ) -> torch.Tensor:
        """The weighted sum of each kept token's nearest other patches: (kept, hidden_size)."""
        keys = F.normalize(tokens.tower.keys[row].flatten(1).float(), dim=-1)
        count = min(self.neighbours, len(patches) - 1)
        sums = []
        for part in kept.split(256):  # never all pairs at once
            likeness = keys[part] @ keys[patches].T
            likeness = likeness.masked_fill(part[:, None] == patches, float("-inf"))
            nearest = patches[likeness.topk(count, dim=1).indices]  # (part, count)
            weighted = attention[nearest][..., None] * tokens.hidden[row, nearest].float()
            sums.append(weighted.sum(1))
        return torch.cat(sums)
