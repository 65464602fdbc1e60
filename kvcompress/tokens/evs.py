"""EVS, Efficient Video Sampling: tokens that changed since the previous frame. https://arxiv.org/abs/2510.14624"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from ..errors import KVCompressError
from ..methods import register_method
from .base import Sees, TokenMethod, Tokens


@register_method("evs")
@dataclass(frozen=True)
class EVS(TokenMethod):
    """Before the language model, drops video tokens that are most similar to those in the previous frame.

    A token is compared with the one at the same place, by the cosine of their embeddings, as in the authors' code in
    vLLM (vllm/multimodal/evs.py); the paper compares the patches' pixels. The frames share the budget, so a frame with
    more change keeps more. A video's first frame stays whole, and images stay.

    `ratio` is 1 - q, where q is the pruning rate, and cannot be less than the first frames' share.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.14624"
    presets: ClassVar[dict[str, dict[str, object]]] = {"q70": {"ratio": 0.3}}  # Nemotron Nano V2 VL was trained with it
    sees: ClassVar[Sees] = "frames"

    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score tokens by their difference from the previous frame; +inf for first frames, newlines and images."""
        scores = torch.full(tokens.vision.shape, float("inf"), device=tokens.vision.device)
        for row, videos in enumerate(tokens.frames):
            for frames in videos:
                for before, columns in pairwise(frames):
                    now, then = (tokens.hidden[row, places].float() for places in (columns, before))
                    scores[row, columns] = 1 - torch.cosine_similarity(now, then, dim=-1)
        return scores

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        stays = (tokens.vision & scores.isinf()).sum(1).tolist()
        for row, (fixed, budget) in enumerate(zip(stays, tokens.budgets, strict=True)):
            if fixed > budget:
                raise KVCompressError(
                    f"evs: row {row} cannot keep {budget} of its {int(tokens.vision[row].sum())} vision tokens: images "
                    f"and the first frame of a video stay, {fixed} tokens"
                )
        return super().choose(scores, tokens)
