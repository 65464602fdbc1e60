"""FrameFusion: merges similar tokens of neighbouring frames, then prunes. https://arxiv.org/abs/2501.01986"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ..errors import KVCompressError
from ..methods import register_method
from .base import Sees, TokenMethod, Tokens


@register_method("framefusion")
@dataclass(frozen=True)
class FrameFusion(TokenMethod):
    """Before each decoder layer, merges similar video tokens of neighbouring frames; later prunes by attention.

    A token is merged into the one at the same place in the previous frame if the cosine of their hidden states is at
    least `similarity`; a run of such tokens becomes its mean. Merging ends at the first layer before which less than
    `least_merged` of the vision tokens are that similar. Before the next layer, the tokens that the prompt's last token
    attends to most in the previous layer stay, as in FastV. All later layers keep the same number. Images and newlines
    are never merged, but they are pruned.

    `ratio` is the authors' cost: the number of vision tokens that a layer holds, averaged over all layers. How many
    stay in the end depends on how many the earlier layers held; if merging alone would go below that, only the most
    similar tokens are merged. It follows the released code (framefusion/main.py), except that merging happens after a
    layer instead of between the layer's attention and its MLP.
    """

    similarity: Annotated[float, Field(ge=-1, le=1)] = 0.6
    least_merged: Annotated[float, Field(ge=0, le=1)] = 0.1

    paper: ClassVar[str] = "https://arxiv.org/abs/2501.01986"
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "cost30": {"ratio": 0.3, "similarity": 0.6, "least_merged": 0.1},
    }
    sees: ClassVar[Sees] = "frames"

    def layers(self, num_layers: int) -> list[int]:
        return list(range(num_layers))

    def prepare(self, tokens: Tokens) -> torch.Tensor:
        """Return each token's place: the first frame's column there, or its own column if it belongs to no frame."""
        columns = torch.arange(tokens.vision.shape[1], device=tokens.vision.device)
        places = columns.expand(len(tokens.vision), -1).clone()
        for row, videos in enumerate(tokens.frames):
            for frames in videos:
                places[row, frames] = frames[0]
        return places

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.attention is None:  # before the first layer
            return torch.zeros(tokens.vision.shape, device=tokens.vision.device)
        return tokens.last_attention()

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        budgets, hidden = [], tokens.hidden
        merged = torch.zeros_like(tokens.vision)
        for row, (budget, counts) in enumerate(zip(tokens.budgets, tokens.counts, strict=True)):
            left, *shares, share = counts[-1], *self._shares(budget, counts, tokens.num_layers)
            if left <= share or any(count <= math.ceil(bound) for count, bound in zip(counts[1:], shares, strict=True)):
                budgets.append(left)
            elif share < 1:
                raise KVCompressError(
                    f"framefusion: a mean of {budget} of {counts[0]} vision tokens over {tokens.num_layers} layers "
                    f"cannot be kept: in row {row} the first {len(shares)} layers hold {sum(counts[1:])}"
                )
            elif all(before - after >= self.least_merged * before for before, after in pairwise(counts)):
                hidden = hidden.clone()
                merged[row] = self._merge(hidden[row], tokens, row, left - math.ceil(share))
                budgets.append(left - int(merged[row].sum()))
            else:
                budgets.append(math.floor(share + 0.5))
        return tokens.best(scores.masked_fill(merged, float("-inf")), budgets), hidden

    def _shares(self, budget: int, counts: list[int], num_layers: int) -> list[float]:
        """Return how many tokens the layers from the first, second, ... on may each hold to meet the budget.

        The budget is a mean over all layers; those before hold `counts[1:]`."""
        before = [sum(counts[1 : layer + 1]) for layer in range(len(counts))]
        return [(budget * num_layers - held) / (num_layers - layer) for layer, held in enumerate(before)]

    def _merge(self, hidden: torch.Tensor, tokens: Tokens, row: int, most: int) -> torch.Tensor:
        """Merge at most `most` tokens of a row in `hidden` (tokens, size); return the merged ones, bool (tokens,)."""
        columns = tokens.vision[row].nonzero()[:, 0]
        places, order = tokens.prepared[row, columns].sort(stable=True)
        columns, states = columns[order], hidden[columns[order]].float()
        alike = torch.cosine_similarity(states[1:], states[:-1], dim=-1)
        is_next = (places[1:] == places[:-1]) & (columns[1:] < len(hidden) - 1)  # the prompt's last token stays
        alike = torch.cat([alike.new_full((1,), -2), alike.masked_fill(~is_next, -2)])
        most = min(int((alike >= self.similarity).sum()), most)
        goes = torch.zeros_like(alike, dtype=torch.bool)
        goes[alike.topk(most).indices] = True
        into = (~goes).cumsum(0) - 1  # a run goes into the token before it
        sums = torch.zeros_like(states).index_add_(0, into, states)[: len(goes) - most]
        hidden[columns[~goes]] = (sums / into.bincount()[:, None]).to(hidden.dtype)
        gone = torch.zeros_like(tokens.vision[row])
        gone[columns[goes]] = True
        return gone
