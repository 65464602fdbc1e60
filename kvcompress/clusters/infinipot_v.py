"""InfiniPot-V: tokens that change from frame to frame, and large values. https://arxiv.org/abs/2506.15745"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import top_indices
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
        if view.vision is None:
            return scores
        found = view.frame_tokens or (0,) * len(view.lengths)
        vision, rank = view.vision_by_head, view.vision_rank
        rank = vision.cumsum(2) - 1 if rank is None else rank
        padding = torch.zeros(1, 1, dtype=torch.long) if view.padding is None else view.padding
        entries = (keys.shape[2] - padding).expand(len(keys), keys.shape[1]).tolist()
        for row, budget in enumerate(view.budgets):
            for head in range(keys.shape[1]):
                of_head = head % vision.shape[1]
                columns = vision[row, of_head].nonzero()[:, 0]
                room = max(budget - (entries[row][head] - len(columns)), 0)
                size = self.frame_tokens or found[row]
                chosen = self.least_redundant(keys[row, head, columns], rank[row, of_head, columns], size, room)
                scores[row, head, columns[chosen]] = 0.0  # above all other vision tokens
        return scores

    def least_redundant(self, keys: torch.Tensor, rank: torch.Tensor, frame_tokens: int, room: int) -> torch.Tensor:
        """Return the vision tokens of a KV head that are kept first, LongTensor (chosen,).

        Args:
            keys: (vision tokens, head_dim).
            rank: LongTensor (vision tokens,), ascending: the index of each among all vision tokens of the row.
            room: entries that the head may keep of them.
        """
        tokens = len(keys)
        frames = tokens // frame_tokens if frame_tokens else 0
        chosen = min(room - round((1 - self.tar) * room), tokens)
        if frames < 2 or not chosen:
            return torch.empty(0, dtype=torch.long, device=keys.device)
        frame, place = rank // frame_tokens, rank % frame_tokens
        ended = (rank[-1] + 1) // frame_tokens  # complete frames
        is_recent = frame >= ended - max(1, int(self.recent * frames))
        compared = is_recent & (frame < ended)
        unit = F.normalize(keys.float(), dim=-1)
        recent = unit.new_zeros(frame_tokens, unit.shape[1]).index_add_(0, place[compared], unit[compared])
        count = torch.bincount(place[compared], minlength=frame_tokens).clamp(min=1)
        likeness = (unit * (recent / count[:, None])[place]).sum(-1)  # mean of the cosines
        novelty = torch.where(is_recent, float("inf"), -likeness)
        return top_indices(novelty[None, None], [chosen])[0, 0]
