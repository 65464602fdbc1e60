"""LLaVA-PruMerge+: outliers of the vision tower's attention, and an even sample. https://arxiv.org/abs/2403.15388"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt

from ..device import on_device
from ..methods import register_method
from .base import Sees, TokenMethod, Tokens, Tower, received_attention


@register_method("prumerge+")
@dataclass(frozen=True)
class PruMergePlus(TokenMethod):
    """Before the language model, keeps outliers of the vision tower's attention and fills up with an even sample.

    Outliers are the tokens whose attention in tower layer `tower_layer` is above Q3 + 1.5 IQR (section 3.2). The rest
    of the budget goes to tokens at even distances (section 3.4). To each kept token, its `neighbours` nearest tokens by
    key are added, weighted by attention (section 3.3; unnormalised and before the projector, as in the released code).
    The last token of the budget is the weighted sum of the dropped tokens (`extra_token`), at the position of the last
    dropped patch.

    Attention is that of the class token: one softmax over the products of whole states, all heads at once, as in the
    released code (clip_encoder.py, token_prune_merge_advanced_plus). With `variant="heads"` each head has its own
    softmax, and their mean counts. Towers without a class token and several images are handled as in `visionzip`.

    With `count="outliers"` as many tokens stay as in the authors' code: the outliers, every n-th patch, where n is a
    third of the patches per outlier, and the extra token. `ratio` is then an upper bound; 1 means no bound. Otherwise
    the budget is met: if there are too many outliers, the highest stay, and n is the largest step that gives enough
    tokens.
    """

    neighbours: NonNegativeInt = 32
    tower_layer: int = -1
    extra_token: bool = True
    count: Literal["budget", "outliers"] = "budget"
    variant: Literal["code", "heads"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2403.15388"
    presets: ClassVar[dict[str, dict[str, object]]] = {"adaptive": {"count": "outliers", "ratio": 1.0}}
    sees: ClassVar[Sees] = "tower"
    joins_heads: ClassVar[bool] = True
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"heads": {"joins_heads": False}}

    @property
    def sets_budgets(self) -> bool:
        return self.count == "outliers"

    def received(self, queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
        if self.of_variant("joins_heads"):
            queries, keys = (states.flatten(1)[:, None] for states in (queries, keys))
        return received_attention(queries, keys, has_class)

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.tower.received

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ranks, hidden, counts = scores.clone(), tokens.hidden.clone(), list(tokens.budgets)
        is_patch = scores > float("-inf")  # the others are newlines between lines of patches
        for row, budget in enumerate(tokens.budgets):
            patches = is_patch[row].nonzero()[:, 0]
            if len(patches) and (budget < len(patches) or self.sets_budgets):
                best = self._spread(scores[row, patches], budget - (self.extra_token and budget > 1))
                ranks[row, patches[best]], counts[row] = float("inf"), len(best)
        chosen = tokens.best(ranks, counts)
        for row, budget in enumerate(tokens.budgets):
            if budget == int(tokens.vision[row].sum()) and not self.sets_budgets:
                continue  # all of the row stays, as if it were alone
            kept, dropped = ((is_patch[row] & side).nonzero()[:, 0] for side in (chosen[row], ~chosen[row]))
            if len(kept) and self.neighbours:
                hidden[row, kept] = self._with_nearest(scores[row], kept, tokens.tower, row).to(hidden)
            if self.extra_token and len(dropped) and budget > 1:
                features = tokens.tower.features[row, dropped]
                summed = (scores[row, dropped, None] * features.float()).sum(0, keepdim=True)
                hidden[row, dropped[-1:]] = tokens.tower.project(summed.to(features.dtype)).to(hidden)
                chosen[row, dropped[-1]] = True
        return chosen, hidden

    def _spread(self, weights: torch.Tensor, budget: int) -> torch.Tensor:
        """Choose the outliers among patches with these weights, and others at even distances.

        Returns the indices of `budget` patches, or of as many as the number of outliers implies."""
        patches = len(weights)
        low, high = torch.quantile(weights, on_device([0.25, 0.75], weights.device, weights.dtype))
        outliers = int((weights > high + 1.5 * (high - low)).sum())
        outliers = int(patches * (outliers / patches))  # as in the released code: rounding may lose one
        first = weights.topk(min(outliers, budget)).indices
        is_other = torch.ones_like(weights, dtype=torch.bool)
        is_other[first] = False
        wanted = budget - len(first)

        def every(step: int) -> torch.Tensor:
            places = torch.arange(0, patches - 1, step, device=weights.device)
            return places[is_other[places]]

        if self.sets_budgets:
            others = every(max(int(patches / max(outliers, 1)) // 3, 1))[:wanted]
        else:
            steps = range(patches // max(wanted, 1), 0, -1)
            enough = (places for places in map(every, steps) if len(places) >= wanted)
            others = next(enough, is_other.nonzero()[:, 0])
            others = others[torch.arange(wanted, device=others.device) * len(others) // max(wanted, 1)]
        return torch.cat([first, others])

    def _with_nearest(self, attention: torch.Tensor, kept: torch.Tensor, tower: Tower, row: int) -> torch.Tensor:
        """Return the kept tokens' states (kept, hidden_size) plus the weighted sum of each one's nearest patches."""
        patches, features = (attention > float("-inf")).nonzero()[:, 0], tower.features[row]
        keys = F.normalize(tower.keys[row].flatten(1).float(), dim=-1)
        states = features[kept].float()
        for start in range(0, len(kept), 256):  # never all pairs at once
            part = kept[start : start + 256]
            likeness = keys[part] @ keys[patches].T
            likeness = likeness.masked_fill(part[:, None] == patches, float("-inf"))
            nearest = patches[likeness.topk(min(self.neighbours, len(patches) - 1), dim=1).indices]  # (part, count)
            states[start : start + 256] += (attention[nearest][..., None] * features[nearest].float()).sum(1)
        return tower.project(states.to(features.dtype))
