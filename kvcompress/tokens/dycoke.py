"""DyCoke: tokens that change from frame to frame of a video. https://arxiv.org/abs/2411.15024"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt

from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.budget import allocate
from .base import Sees, TokenMethod, Tokens

CHANGED = 0.9  # below this cosine with the previous step's attention, tokens are chosen again


@register_method("dycoke")
@dataclass(frozen=True)
class DyCoke(TokenMethod):
    """Before the language model, merges the tokens of a video over time (section 3.2, stage 1).

    Of every four frames the first stays whole. The second and fourth keep the tokens least similar to those at the same
    place one frame before, the third those least similar to the first's, by the cosine of their embeddings. As in the
    released code, the third frame of the last four, or fewer, also stays whole; with `variant="paper"` it does not.
    Images stay.

    The paper's rate p is the part of these frames that is dropped, so `ratio` is about 1 - 3 p / 4 and never below 1 /
    4.

    While decoding (section 3.3, stage 2), the layers from `layer` (L) on do not see `decode_drop` of the vision tokens:
    those that the new token attends to least in the previous layer, chosen again at each step. If its attention over
    them has a cosine of 0.9 or more with the previous step's, it sees all, as in the released code. All tokens stay in
    the cache, so any can come back; this saves no memory. 0 turns it off.
    """

    layer: PositiveInt = 3
    decode_drop: Annotated[float, Field(ge=0, lt=1)] = 0.8
    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2411.15024"
    # For 32 frames of 196 tokens and a newline, where 24 frames (23 in the code) keep 58 tokens each.
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "code": {"ratio": (9 * 196 + 23 * 58 + 1) / (32 * 196 + 1), "layer": 3, "decode_drop": 0.8},
        "paper": {
            "ratio": (8 * 196 + 24 * 58 + 1) / (32 * 196 + 1),
            "layer": 3,
            "decode_drop": 0.7,
            "variant": "paper",
        },
    }
    sees: ClassVar[Sees] = "frames"
    spares_third: ClassVar[bool] = True  # in the last four frames
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"paper": {"spares_third": False}}

    def hides_from(self, num_layers: int) -> int | None:
        if not self.decode_drop:
            return None
        if self.layer >= num_layers:
            raise KVCompressError(
                f"dycoke: layer={self.layer} is not below the model's {num_layers} layers (decode_drop=0 needs none)"
            )
        return self.layer

    def hide(self, attention: torch.Tensor, vision: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        shown = (vision.sum(1, keepdim=True).double() * (1 - self.decode_drop)).long()
        order = attention.masked_fill(~vision, -1).argsort(dim=1, descending=True, stable=True)
        hidden = vision & (order.argsort(dim=1) >= shown)
        if before is not None:
            alike = torch.cosine_similarity(attention * vision, before * vision, dim=1)
            hidden &= (alike < CHANGED)[:, None]
        return hidden

    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score tokens by their difference from the earlier frame; +inf for first frames, newlines and images."""
        scores = torch.full(tokens.vision.shape, float("inf"), device=tokens.vision.device)
        for row, videos in enumerate(tokens.frames):
            for columns in videos:
                for frame in self._later(len(columns)):
                    before = frame - 2 if frame % 4 == 2 else frame - 1
                    now, then = (tokens.hidden[row, columns[f]].float() for f in (frame, before))
                    scores[row, columns[frame]] = 1 - torch.cosine_similarity(now, then, dim=-1)
        return scores

    def _later(self, frames: int) -> list[int]:
        """Return the frames that lose tokens: of every four, all but the first.

        The released code also spares the third of the last four, or fewer, frames (llava_arch.py:78)."""
        last = frames - 1 - (frames - 1) % 4 if self.of_variant("spares_third") else frames
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
        return tokens.best(chosen.float()), tokens.hidden
