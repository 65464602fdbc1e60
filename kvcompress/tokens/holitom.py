"""HoliTom: a video's tokens merged over the frames in which they stay alike. https://arxiv.org/abs/2505.21334"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt

from ..methods import register_method
from ..scoring.density import density_peaks
from .base import Sees, TokenMethod, Tokens, checked_layer

NEIGHBOURS = 7  # of a token, by which its density is measured


@register_method("holitom")
@dataclass(frozen=True)
class HoliTom(TokenMethod):
    """Before the language model, merges tokens over the frames of a video, then within frames; later by attention.

    A place is static in a window of frames if its tokens in any two neighbouring frames of the window have a cosine
    above `similarity`. Windows are those that merge most tokens, found by dynamic programming. The static
    tokens of a window become their means over its frames, in the first of these.

    Of what is then left the same share is kept of everything: of a frame's other tokens those that
    receive most attention in the vision tower's layer `tower_layer`, and of a window's static tokens the density peaks,
    into each of which the mean of those nearest to it is merged, with the weight 1 - `own_weight`. Images and newlines
    stay, and count.

    Within the language model, if `inner_layer` is given: from this layer on, a share `inner_drop` of the vision tokens
    is gone, those that the prompt's last token attends to least in the previous layer. Each is averaged into the most
    similar one that stays, one after the other. `ratio` is the share that enters the language model.

    If merging over frames alone would leave less than `ratio`, `similarity` is raised as far as needed.
    """

    similarity: Annotated[float, Field(ge=-1, le=1)] = 0.8
    own_weight: Annotated[float, Field(ge=0, le=1)] = 0.6
    inner_layer: PositiveInt | None = None
    inner_drop: Annotated[float, Field(ge=0, lt=1)] = 0.5
    tower_layer: int = -1

    paper: ClassVar[str] = "https://arxiv.org/abs/2505.21334"
    presets: ClassVar[dict[str, dict[str, object]]] = {  # for the 28 layers of a model of 7B
        "r25": {"ratio": 0.25, "similarity": 0.8, "inner_layer": 18, "inner_drop": 0.5},
        "r20": {"ratio": 0.2, "similarity": 0.8, "inner_layer": 18, "inner_drop": 0.5},
        "r15": {"ratio": 0.15, "similarity": 0.8, "inner_layer": 18, "inner_drop": 0.5},
        "r10": {"ratio": 0.1, "similarity": 0.65, "inner_layer": 18, "inner_drop": 0.5},
    }
    sees: ClassVar[Sees] = "video"

    def layers(self, num_layers: int) -> list[int]:
        if self.inner_layer is None:
            return [0]
        return [0, checked_layer("holitom", self.inner_layer, num_layers, "inner_layer")]

    def budgets(self, kept: int, vision_tokens: int, num_layers: int) -> list[int]:
        inner = kept if kept in (0, vision_tokens) else max(round(kept * (1 - self.inner_drop)), 1)
        return [kept, inner][: len(self.layers(num_layers))]

    def score(self, tokens: Tokens) -> torch.Tensor:
        is_first = tokens.attention is None  # before the first layer
        return tokens.tower.received if is_first else tokens.last_attention()

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        if len(tokens.counts[0]) > 1:
            return self._choose_inner(scores, tokens)
        chosen, hidden = tokens.vision.clone(), tokens.hidden.clone()
        for row, videos in enumerate(tokens.videos("holitom")):
            for columns, budget in videos:
                if budget < columns.numel():
                    kept, merged = self._merged(tokens.hidden[row, columns].float(), scores[row, columns], budget)
                    chosen[row, columns] = kept
                    hidden[row, columns] = merged.to(hidden.dtype)
        return chosen, hidden

    def _merged(self, states: torch.Tensor, attention: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge a video (frames, tokens, size), given the attention to it (frames, tokens), down to `budget` tokens.

        Returns bool (frames, tokens), True at those that stay, and the states with the rest merged into them."""
        alike = torch.cosine_similarity(states[1:], states[:-1], dim=-1)
        higher = alike[alike > self.similarity].unique().tolist()
        similarities = [self.similarity, *higher]
        enough = bisect_left(similarities, budget, key=lambda bound: attention.numel() - windows(alike > bound)[1])
        same = alike > similarities[enough]
        ends, _ = windows(same)
        static = torch.zeros_like(attention, dtype=torch.bool)
        for begin, end in pairwise(ends):
            static[begin:end] = same[begin : end - 1].all(0) & (end - begin > 1)
        counts = shares((~static).sum(1).tolist(), [int(static[begin].sum()) for begin in ends[:-1]], budget)
        kept, merged = torch.zeros_like(static), states.clone()
        for frame, count in enumerate(counts[: len(states)]):
            kept[frame, attention[frame].masked_fill(static[frame], float("-inf")).topk(count).indices] = True
        for (begin, end), count in zip(pairwise(ends), counts[len(states) :], strict=True):
            if count:
                places = static[begin].nonzero()[:, 0]
                means = states[begin:end, places].mean(0)
                peaks, cluster = density_peaks(means, count, min(NEIGHBOURS, count))
                kept[begin, places[peaks]] = True
                merged[begin, places[peaks]] = self._clustered(means, peaks, cluster)
        return kept, merged

    def _clustered(self, states: torch.Tensor, peaks: torch.Tensor, cluster: torch.Tensor) -> torch.Tensor:
        """Merge states (tokens, size) into the peaks (peaks,) of their `cluster` (tokens,)."""
        others = cluster.bincount()[:, None] - 1
        sums = torch.zeros_like(states[peaks]).index_add_(0, cluster, states) - states[peaks]
        own = torch.where(others > 0, self.own_weight, 1.0)
        return own * states[peaks] + (1 - own) * sums / others.clamp(min=1)

    def _choose_inner(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, hidden = tokens.best(scores), tokens.hidden.clone()
        for row, (stays, vision) in enumerate(zip(chosen, tokens.vision, strict=True)):
            kept, dropped = (tokens.hidden[row, mask].float() for mask in (stays, vision & ~stays))
            if len(dropped):
                nearest = (F.normalize(dropped, dim=-1) @ F.normalize(kept, dim=-1).T).argmax(1)
                into = F.one_hot(nearest, len(kept))
                # Each averaging halves all that was averaged before.
                halvings = into.flip(0).cumsum(0).flip(0).gather(1, nearest[:, None])
                kept = kept * 0.5 ** into.sum(0)[:, None]
                hidden[row, stays] = kept.index_add(0, nearest, dropped * 0.5**halvings).to(hidden.dtype)
        return chosen, hidden


def windows(same: torch.Tensor) -> tuple[list[int], int]:
    """Cut a video into the windows of frames in which most tokens can be merged.

    Args:
        same: bool (frames - 1, tokens), whether a token is like the one in the frame before.

    Returns:
        where windows begin, and the number of frames; and how many tokens less there are if in each window all tokens
        that stay the same over it become one.
    """
    frames = len(same) + 1
    static = [same[begin:].long().cumprod(0).sum(1).tolist() for begin in range(frames - 1)]  # [begin][length - 2]
    most, before = [0], []  # tokens saved in the first frames; where the last window of these begins
    for end in range(1, frames + 1):
        most.append(most[-1])
        before.append(end - 1)
        for begin in range(end - 2, -1, -1):
            length = end - begin
            saved = most[begin] + static[begin][length - 2] * (length - 1)
            if saved > most[end]:
                most[end], before[end - 1] = saved, begin
    begins = [frames]
    while begins[-1]:
        begins.append(before[begins[-1] - 1])
    return begins[::-1], most[-1]


def shares(moving: list[int], static: list[int], budget: int) -> list[int]:
    """Return how many tokens to keep of each frame's `moving` tokens and then of each window's `static` ones.

    It is the same share of all, rounded as in the released code (up for those that move), so that the sum is at most
    `budget`; what is left to it goes to some of those whose number would grow next."""

    def at(share: float) -> list[int]:
        return [math.ceil(size * share) for size in moving] + [round(size * share) for size in static]

    low, high = 0.0, 1.0
    if sum(at(high)) <= budget:
        return at(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= budget else (low, middle)
    counts, more = at(low), at(high)
    growing, left = [place for place, count in enumerate(more) if count > counts[place]], budget - sum(counts)
    for number in range(left):
        counts[growing[number * len(growing) // left]] += 1
    return counts
