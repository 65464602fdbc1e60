"""DivPrune: the vision tokens that are farthest from each other. https://arxiv.org/abs/2503.02175"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..methods import register_method
from .base import Sees, TokenMethod, Tokens


@register_method("divprune")
@dataclass(frozen=True)
class DivPrune(TokenMethod):
    """Before the language model, keeps vision tokens that are far from each other.

    It solves the max-min diversity problem greedily, with 1 - the cosine of two embeddings as the distance. The first
    token is the one farthest from its nearest neighbour; each further one is the farthest from its nearest kept token.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.02175"
    presets: ClassVar[dict[str, dict[str, object]]] = {"image": {"ratio": 0.098}, "video": {"ratio": 0.1}}  # tflops.py
    sees: ClassVar[Sees] = "embeddings"

    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score tokens by the order in which they are chosen, the first highest."""
        scores = torch.zeros(tokens.vision.shape, dtype=torch.float32, device=tokens.vision.device)
        for row, budget in enumerate(tokens.budgets):
            if budget:
                columns = tokens.vision[row].nonzero()[:, 0]
                chosen = farthest_first(F.normalize(tokens.hidden[row, columns].float(), dim=-1), budget)
                scores[row, columns[chosen]] = budget - torch.arange(budget, device=scores.device).float()
        return scores


def farthest_first(states: torch.Tensor, count: int) -> torch.Tensor:
    """Choose `count` of the states (tokens, size), of length 1: their indices (count,), in the order of choice."""
    tokens = torch.arange(len(states), device=states.device)
    apart = torch.empty_like(states[:, 0])  # distance to the nearest other, later kept, token
    for part in tokens.split(1024):  # never all pairs at once
        likeness = (states[part] @ states.T).masked_fill(part[:, None] == tokens, -1)
        apart[part] = 1 - likeness.amax(1)
    chosen = torch.zeros(count, dtype=torch.long, device=states.device)
    for step in range(count):
        farthest = chosen[step] = apart.argmax()
        distances = 1 - states @ states[farthest]
        apart = torch.minimum(apart, distances) if step else distances
        apart[farthest] = -torch.inf
    return chosen
