"""FastVID: what is salient and dense in each segment of a video. https://arxiv.org/abs/2503.11187"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt

from ..methods import register_method
from ..scoring.density import density_peaks
from .base import Sees, TokenMethod, Tokens, received_attention

NEIGHBOURS = 4  # of a token, by which its density is measured


@register_method("fastvid")
@dataclass(frozen=True)
class FastVID(TokenMethod):
    """Before the language model, keeps salient tokens of each frame, and dense ones into which the rest is merged.

    A video is cut into segments where neighbouring frames are least alike, by the cosine of their mean embeddings: at
    the `segments` - 1 lowest, and wherever it is below `similarity`. All frames keep equally many tokens.
    A share `contextual` of them goes to the segment's anchors, every `anchor_interval`th frame back from its last one.
    The others are salient: those of each frame that receive most attention in the vision tower's layer `tower_layer`.

    An anchor's contextual tokens are its density peaks among what is not salient. Every token of the segment that is
    not salient goes into the contextual token most similar to it, in each anchor anew: the contextual token becomes
    `own_weight` of itself, or more if it stands for few, and the rest the mean of what went into it.

    Where an anchor has too few tokens for its share, the segment's other frames keep more salient ones. Images and
    newlines stay, and count. Attention is that of a frame's mean query, as in the released code for Qwen2.5-VL.
    """

    segments: PositiveInt = 8
    similarity: Annotated[float, Field(ge=-1, le=1)] = 0.9
    contextual: Annotated[float, Field(ge=0, le=1)] = 0.4
    anchor_interval: PositiveInt = 4
    own_weight: Annotated[float, Field(ge=0, le=1)] = 0.6
    tower_layer: int = -1

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.11187"
    presets: ClassVar[dict[str, dict[str, object]]] = {  # for 32 frames of 196 tokens and a newline
        f"r{percent}": {"ratio": (32 * (196 * percent // 100) + 1) / (32 * 196 + 1)} for percent in (25, 20, 15, 10)
    }
    sees: ClassVar[Sees] = "video"

    def received(self, queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
        return received_attention(queries if has_class else queries.float().mean(0, keepdim=True), keys, has_class)

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.tower.received

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, hidden = tokens.vision.clone(), tokens.hidden.clone()
        for row, videos in enumerate(tokens.videos("fastvid")):
            for columns, budget in videos:
                if budget == columns.numel():
                    continue
                begin, states = 0, tokens.hidden[row, columns].float()
                shares = [(f + 1) * budget // len(columns) - f * budget // len(columns) for f in range(len(columns))]
                for length in self._segments(states):
                    part = slice(begin, begin + length)
                    kept, merged = self._pruned(states[part], scores[row, columns[part]], shares[part])
                    chosen[row, columns[part]] = kept
                    hidden[row, columns[part]] = merged.to(hidden.dtype)
                    begin += length
        return chosen, hidden

    def _segments(self, states: torch.Tensor) -> list[int]:
        """Return the lengths of the segments of a video (frames, tokens, size)."""
        frames = states.mean(1)
        alike = torch.cosine_similarity(frames[:-1], frames[1:], dim=-1)
        is_cut = alike < self.similarity
        is_cut[alike.topk(min(self.segments - 1, len(alike)), largest=False).indices] = True
        ends = [*(is_cut.nonzero()[:, 0] + 1).tolist(), len(frames)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def _pruned(
        self, states: torch.Tensor, attention: torch.Tensor, shares: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose `shares` tokens per frame of a segment (frames, tokens, size), by the attention (frames, tokens).

        Returns bool (frames, tokens), and the states with the rest merged into them."""
        contextual = [int(share * self.contextual) for share in shares]
        salient = torch.zeros_like(attention, dtype=torch.bool)
        for frame, (share, others) in enumerate(zip(shares, contextual, strict=True)):
            salient[frame, attention[frame].topk(share - others).indices] = True
        room = (~salient).sum(1).tolist()
        anchors = range(len(shares) - 1, -1, -self.anchor_interval)
        counts, left = dict.fromkeys(anchors, 0), sum(contextual)
        while left and any(counts[anchor] < room[anchor] for anchor in anchors):
            for anchor in anchors:
                if left and counts[anchor] < room[anchor]:
                    counts[anchor], left = counts[anchor] + 1, left - 1
        between = attention.masked_fill(salient, float("-inf"))
        between[list(anchors)] = float("-inf")
        salient.view(-1)[between.view(-1).topk(left).indices] = True
        kept, merged, pool = salient.clone(), states.clone(), states[~salient]
        for anchor, count in counts.items():
            if count:
                places = (~salient[anchor]).nonzero()[:, 0]
                places = places[density_peaks(states[anchor, places], count, NEIGHBOURS)[0]]
                kept[anchor, places] = True
                merged[anchor, places] = self._merged(states[anchor, places], pool)
        return kept, merged

    def _merged(self, targets: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """Merge `pool` (tokens, size), of which `targets` (targets, size) are part, into the targets."""
        nearest = (F.normalize(pool, dim=-1) @ F.normalize(targets, dim=-1).T).argmax(1)
        count = nearest.bincount(minlength=len(targets))[:, None]
        means = torch.zeros_like(targets).index_add_(0, nearest, pool) / count.clamp(min=1)
        own = (1 / (count + 1)).clamp(min=self.own_weight)
        return own * targets + (1 - own) * means
