"""DART: vision tokens that do not duplicate a few pivot tokens. https://arxiv.org/abs/2502.11494"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt

from ..methods import register_method
from .base import TokenMethod, Tokens, checked_layer


@register_method("dart")
@dataclass(frozen=True)
class DART(TokenMethod):
    """From decoder layer `layer` (K) on, keeps pivot tokens and the vision tokens that are least like them.

    Pivots are the `image_pivots` vision tokens and the `text_pivots` tokens after the last image whose keys in the
    previous layer have the largest L1 norm. In the order of the prompt, each pivot keeps an equal number of vision
    tokens: of those not yet kept, the ones whose hidden states have the lowest cosine with its own. The vision pivots
    stay as well.
    """

    layer: PositiveInt = 2
    image_pivots: PositiveInt = 4
    text_pivots: NonNegativeInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.11494"
    # Of 576 tokens; the authors count 192, 128 and 64, the tokens of the eight pivots' turns without the pivots.
    presets: ClassVar[dict[str, dict[str, object]]] = {
        str(kept): {"budget": kept + 4, "layer": 2, "image_pivots": 4, "text_pivots": 4} for kept in (192, 128, 64)
    }

    def layers(self, num_layers: int) -> list[int]:
        return [checked_layer("dart", self.layer, num_layers)]

    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score tokens, text too, by the L1 norm of their keys, over all KV heads."""
        return tokens.attention.keys.float().abs().sum((1, 3))

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = torch.zeros_like(scores)
        for row, budget in enumerate(tokens.budgets):
            if budget:
                kept = self._kept(scores[row], tokens.hidden[row], tokens.vision[row], budget)
                ranks[row, kept] = budget - torch.arange(budget, device=kept.device).float()
        return tokens.best(ranks), tokens.hidden

    def _kept(self, norms: torch.Tensor, hidden: torch.Tensor, vision: torch.Tensor, budget: int) -> torch.Tensor:
        """Return the columns (budget,) of a row's vision tokens that stay, in the order of choice.

        `norms` is (tokens,), `hidden` (tokens, size), `vision` bool (tokens,)."""
        states, is_left = F.normalize(hidden.float(), dim=-1), vision.clone()
        columns = vision.nonzero()[:, 0]
        behind = torch.arange(int(columns[-1]) + 1, len(vision), device=columns.device)
        kept = columns[norms[columns].topk(min(self.image_pivots, budget)).indices]
        asking = behind[norms[behind].topk(min(self.text_pivots, len(behind))).indices]
        pivots, chosen = torch.cat([kept.sort().values, asking.sort().values]), [kept]
        share, more = divmod(budget - len(kept), len(pivots))
        is_left[kept] = False
        for turn, pivot in enumerate(pivots):
            likeness = (states @ states[pivot]).masked_fill(~is_left, float("inf"))
            chosen.append(likeness.argsort(stable=True)[: share + (turn < more)])
            is_left[chosen[-1]] = False
        return torch.cat(chosen)
