"""InfiniPot-V: tokens that change from frame to frame, and large values. https://arxiv.org/abs/2506.15745"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt

from ..device import on_device
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import ranks
from ..scoring.vision import text_first
from .base import KVCluster

Share = Annotated[float, Field(ge=0, le=1)]


@register_method("infinipot-v")
@dataclass(frozen=True)
class InfiniPotVKVCluster(KVCluster):
    """Keeps text and two kinds of video tokens (TaR and VaN). Uses no queries.

    Of the room that text leaves, `tar` goes to the last `recent` of the frames and to the older tokens least similar to
    the recent frames' tokens at the same place (temporal-axis redundancy). The rest goes to the largest value norms
    (VaN). The defaults, a half and a quarter, are those of the paper's code.

    `frame_tokens` is the number of vision tokens per frame; 0 reads it from the prompt, see
    `scoring.vision.frame_tokens`. Tokens after the last whole frame count as recent. Without a video, or with only one
    frame, vision tokens are ranked by value norm alone; so is text where it exceeds the budget, and so is everything
    while decoding. The paper compresses a stream block by block; here a prompt is one block, or one per chunk with
    `prefill_chunk`. What was kept of older blocks counts as the number of frames that it fills.
    """

    tar: Share = 0.5
    recent: Share = 0.25
    frame_tokens: NonNegativeInt = 0

    paper: ClassVar[str] = "https://arxiv.org/abs/2506.15745"
    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = text_first(values.float().norm(dim=-1), view)
        sizes = [self.frame_tokens or found for found in view.frame_tokens or [0] * len(keys)]
        if view.vision is None or not max(sizes):
            return scores
        vision, columns = view.vision_by_head.expand(keys.shape[:3]), keys.shape[2]
        pads = 0 if view.padding is None else view.padding
        budgets = [budget if size else 0 for budget, size in zip(view.budgets, sizes, strict=True)]
        budgets = on_device(budgets, keys.device)[:, None]
        room = (budgets - (columns - pads - vision.sum(2))).clamp(min=0)  # (batch, kv_heads)
        chosen = room - ((1 - self.tar) * room).round()
        return scores.masked_fill(self.least_redundant(keys, vision, sizes, chosen, view), 0.0)  # above other vision

    def least_redundant(
        self, keys: torch.Tensor, vision: torch.Tensor, sizes: list[int], chosen: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """Return which vision tokens are kept first, bool (batch, kv_heads, columns).

        Args:
            keys: (batch, kv_heads, columns, head_dim).
            vision: bool (batch, kv_heads, columns).
            sizes: vision tokens per frame of each row, 0 if unknown.
            chosen: how many are kept, (batch, kv_heads).
        """
        rank = vision.cumsum(2) - 1 if view.vision_rank is None else view.vision_rank.expand_as(vision)
        size = on_device(sizes, keys.device)[:, None, None].clamp(min=1)
        frames = vision.sum(2, keepdim=True) // size
        frame, place = rank // size, rank % size
        ended = (rank.masked_fill(~vision, -1).amax(2, keepdim=True) + 1) // size  # complete frames
        is_recent = frame >= ended - (self.recent * frames).long().clamp(min=1)
        compared = vision & is_recent & (frame < ended)
        heads = zip(keys.unbind(1), place.unbind(1), compared.unbind(1), strict=True)  # one at a time to save memory
        likeness = torch.stack([likeness_at_place(*of_head, max(sizes)) for of_head in heads], dim=1)
        novelty = torch.where(is_recent, float("inf"), -likeness).masked_fill(~vision, float("-inf"))
        return (ranks(novelty) < chosen.unsqueeze(-1)) & vision & (frames >= 2)


def likeness_at_place(keys: torch.Tensor, place: torch.Tensor, compared: torch.Tensor, places: int) -> torch.Tensor:
    """Return each key's mean cosine to the `compared` keys at the same place, (batch, columns); 0 if there are none.

    Takes keys (batch, columns, head_dim), their place below `places` and whether others are compared with them, both
    (batch, columns)."""
    unit = F.normalize(keys.float(), dim=-1)
    at = place.unsqueeze(-1).expand_as(unit)
    sums = unit.new_zeros(len(unit), places, unit.shape[2])
    sums = sums.scatter_add(1, at, unit.masked_fill(~compared.unsqueeze(-1), 0.0))
    count = torch.zeros_like(sums[..., 0]).scatter_add(1, place, compared.float()).clamp(min=1)
    return (unit * (sums / count.unsqueeze(-1)).gather(1, at)).sum(-1)
