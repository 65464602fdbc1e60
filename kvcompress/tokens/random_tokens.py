"""Random vision tokens: the baseline that every token method has to beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..methods import register_method
from ..scoring.layer_view import generator_of
from .base import Sees, TokenMethod, Tokens


@register_method("random-tokens")
@dataclass(frozen=True)
class RandomTokens(TokenMethod):
    """Before the language model, keeps a uniformly random set of the vision tokens.

    The draw depends on `seed` and the row's own tokens, so it is the same in any batch and on any device, but differs
    between prompts.
    """

    seed: int = 0

    sees: ClassVar[Sees] = "embeddings"

    @property
    def reads_prompt(self) -> bool:
        return True  # its checksum seeds the draw

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = torch.zeros(tokens.vision.shape, dtype=torch.float32)
        for row, (vision, row_seed) in enumerate(zip(tokens.vision.cpu(), tokens.row_seeds, strict=True)):
            draw = generator_of(self.seed, row_seed)
            scores[row, vision] = torch.rand(int(vision.sum()), dtype=torch.float32, generator=draw)
        return scores.to(tokens.vision.device)
