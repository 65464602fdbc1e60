"""CDPruner: vision tokens that differ from each other and match the question. https://arxiv.org/abs/2506.10967"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..methods import register_method
from .base import Sees, TokenMethod, Tokens

USED_UP = 1e-3  # part of a token's length below which its remainder after projection is noise


@register_method("cdpruner")
@dataclass(frozen=True)
class CDPruner(TokenMethod):
    """Before the language model, keeps the vision tokens with the greatest conditional diversity.

    Tokens are chosen by greedy MAP inference of a determinantal point process. Its kernel is the cosine of each pair's
    embeddings times both tokens' relevance. Each step therefore adds the token whose embedding, scaled by its
    relevance, has the largest part outside the span of the chosen ones.

    Relevance is the mean cosine with the embeddings of the text after the last image, scaled to (0, 1] (section 3.3).
    For LLaVA the authors use CLIP's text tower with the sign reversed; no checkpoint holds that tower, so here all
    models are treated alike. With `relevance="none"`, or without text after the image, all tokens are equally relevant.

    Once the kernel's rank is exhausted (fewer dimensions than tokens to keep, or equal tokens), relevance decides.
    """

    relevance: Literal["embeddings", "none"] = "embeddings"

    paper: ClassVar[str] = "https://arxiv.org/abs/2506.10967"
    presets: ClassVar[dict[str, dict[str, object]]] = {"128": {"budget": 128}, "64": {"budget": 64}}  # of 576
    sees: ClassVar[Sees] = "embeddings"

    @property
    def reads_prompt(self) -> bool:
        return self.relevance != "none"

    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score tokens by the order in which they are chosen, the rest below 0 by relevance."""
        scores = torch.zeros(tokens.vision.shape, dtype=torch.float32, device=tokens.vision.device)
        for row, budget in enumerate(tokens.budgets):
            if budget:
                columns = tokens.vision[row].nonzero()[:, 0]
                states = F.normalize(tokens.hidden[row].float(), dim=-1)
                relevance = self._relevance(states[columns], states[columns[-1] + 1 :])
                chosen = most_diverse(relevance[:, None] * states[columns], budget)
                scores[row, columns] = relevance - 2
                scores[row, columns[chosen]] = budget - torch.arange(len(chosen), device=scores.device).float()
        return scores

    def _relevance(self, states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the relevance of states (tokens, size) to those of a text, all of length 1: (tokens,), at most 1."""
        if self.relevance == "none" or not len(text):
            return torch.ones_like(states[:, 0])
        alike = states @ text.mean(0)
        return (alike - alike.min() + 1e-6) / (alike.max() - alike.min() + 1e-6)


def most_diverse(states: torch.Tensor, count: int) -> torch.Tensor:
    """Greedily choose the states (tokens, size) that span the largest volume.

    Returns the indices of `count` states, or of as many as are independent, in the order in which they are chosen."""
    rest, lengths = states.clone(), states.norm(dim=1)  # rest: the part outside the span of the chosen ones
    chosen = []
    for _ in range(count):
        gains = rest.norm(dim=1)
        gains[gains <= USED_UP * lengths] = 0
        best = gains.argmax()
        if not gains[best]:
            break
        direction = rest[best] / gains[best]
        rest.addr_(rest @ direction, direction, alpha=-1)
        chosen.append(best)
    return torch.stack(chosen) if chosen else torch.zeros(0, dtype=torch.long, device=states.device)
