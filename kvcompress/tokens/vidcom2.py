"""VidCom2: more tokens for unusual frames, and the unusual tokens of each. https://arxiv.org/abs/2505.14454"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..device import on_device
from ..methods import register_method
from ..scoring.budget import allocate
from .base import Sees, TokenMethod, Tokens

WIDTHS = [2.0**power for power in range(-3, 2)]  # of the Gaussian kernels
TEMPERATURE = 0.01  # of the softmax over frames


@register_method("vidcom2")
@dataclass(frozen=True)
class VidCom2(TokenMethod):
    """Before the language model, keeps the tokens of a video that are unlike its mean and unlike their frame's mean.

    Likeness is a sum of Gaussian kernels of the distance between a token's embedding, of length 1, and the mean of the
    video's or of the frame's. It is taken over the half of the channels that vary least within the video. A frame's
    share of the budget grows with its mean unlikeness to the video, by a softmax over frames. Each frame keeps the
    tokens that are least like both means.

    Every frame keeps a token, if the budget has as many. Several videos of a row get tokens in proportion to their
    lengths. Images stay.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2505.14454"
    presets: ClassVar[dict[str, dict[str, object]]] = {"r25": {"ratio": 0.25}}
    sees: ClassVar[Sees] = "frames"

    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score the tokens of frames 1 if they stay and 0 if not; +inf for newlines and images."""
        scores = torch.full(tokens.vision.shape, float("inf"), device=tokens.vision.device)
        for row, videos in enumerate(tokens.videos("vidcom2")):
            for frames, share in videos:
                scores[row, frames] = kept_of_frames(tokens.hidden[row, frames].float(), share).float()
        return scores


def kept_of_frames(video: torch.Tensor, budget: int) -> torch.Tensor:
    """Choose `budget` tokens of a video (frames, tokens, size): bool (frames, tokens)."""
    flat = video.flatten(0, 1)
    steady = flat.var(0, correction=0).argsort(stable=True)[: flat.shape[1] // 2]
    states = F.normalize(video[..., steady], dim=-1)
    to_video, to_frame = likeness(states, states.mean((0, 1))), likeness(states, states.mean(1, keepdim=True))
    unusual = (-to_video.mean(1).double() / TEMPERATURE).softmax(0)
    counts = allocate((1 + unusual - unusual.mean()).tolist(), budget, video.shape[1])
    place = (to_video + to_frame).argsort(dim=1, stable=True).argsort(dim=1)  # within its frame
    return place < on_device(counts, place.device)[:, None]


def likeness(states: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the sum of Gaussian kernels between states (frames, tokens, size) and a mean: (frames, tokens)."""
    apart = (states - mean).square().sum(-1)
    return sum(torch.exp(-apart / (2 * width)) for width in WIDTHS)
