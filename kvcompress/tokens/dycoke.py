"""DyCoke: what changes from frame to frame of a video. https://arxiv.org/abs/2411.15024"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.budget import allocate
from .base import TokenMethod, Tokens


@register_method("dycoke")
@dataclass(frozen=True)
class DyCoke(TokenMethod):
    """Before the language model, merges the tokens of a video over time (section 3.2, stage 1): of every four frames
    the first stays whole; the second and fourth keep the tokens that are least like those at the same place one frame
    before, the third those that are least like the first's, by the cosine of their embeddings.

    The paper's rate p drops that part of the later three frames, so `ratio` is 1 - 3 p / 4: 0.475 for its p = 0.7, and
    never below 1 / 4. Images stay. Its second stage, which hides tokens from the cache while decoding and may take
    them back, is left out.
    """

    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2411.15024"
    sees: ClassVar[Literal["attention", "tower", "frames"]] = "frames"

    def layers(self, num_layers: int) -> list[int]:
        return [0]

    def score(self, tokens: Tokens) -> torch.Tensor:
        """How unlike the earlier frame; +inf for what stays anyway: first frames, newlines, images."""
        scores = torch.full(tokens.vision.shape, float("inf"), device=tokens.vision.device)
        for row, videos in enumerate(tokens.frames):
            for columns in videos:
                for frame in self._later(len(columns)):
                    before = frame - 2 if frame % 4 == 2 else frame - 1
                    now, then = (tokens.hidden[row, columns[f]].float() for f in (frame, before))
                    scores[row, columns[frame]] = 1 - torch.cosine_similarity(now, then, dim=-1)
        return scores

    def _later(self, frames: int) -> list[int]:
        """Of so many frames those that lose tokens: of each four all but the first, and in the released code all but
        the third of the last four, or fewer, there are (llava_arch.py:78)."""
        last = frames - 1 - (frames - 1) % 4 if self.variant == "code" else frames
        return [frame for frame in range(frames) if frame % 4 and frame != last + 2]

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = tokens.vision & scores.isinf()
        for row, budget in enumerate(tokens.budgets):
            later = [video[frame] for video in tokens.frames[row] for frame in self._later(len(video))]
            fixed, sizes = int(chosen[row].sum()), [len(columns) for columns in later]
            if not fixed <= budget <= fixed + sum(sizes):
                raise KVCompressError(
                    f"dycoke: row {row} cannot keep {budget} of its {fixed + sum(sizes)} vision tokens: images and "
                    f"every fourth frame of a video stay (and variant='code' spares one more), {fixed} tokens"
                )
            shares = allocate(sizes, budget - fixed, max(sizes)) if sizes else []
            for columns, share in zip(later, shares, strict=True):
                chosen[row, columns[scores[row, columns].topk(share).indices]] = True
        return chosen, tokens.hidden
