"""InfiniPot-V: what changes from frame to frame, and large values; no query asked. https://arxiv.org/abs/2506.15745"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt

from ..selection import top_indices
from ..vision import text_first
from .base import KVCluster, Prompt, register_method

Share = Annotated[float, Field(ge=0, le=1)]


@register_method("infinipot-v")
@dataclass(frozen=True)
class InfiniPotVKVCluster(KVCluster):
    """Keeps text, and of a video two kinds of tokens (TaR and VaN). `tar` of the room that text leaves goes to the last
    `recent` of the frames and to those older tokens that are least like the recent frames' tokens at the same place
    (temporal-axis redundancy); the rest to the largest value norms (VaN). Half and a quarter as in the paper's code.

    `frame_tokens` is the number of vision tokens per frame; 0 takes it from the prompt, see
    `kvcompress.vision.frame_tokens`. Tokens behind the last whole frame count as recent. Where there is no video, or
    only one frame, vision is ranked by value norm alone; so is text where it exceeds the budget, and everything while
    decoding. The paper compresses a stream block by block; here a prompt is one block.
    """

    tar: Share = 0.5
    recent: Share = 0.25
    frame_tokens: NonNegativeInt = 0

    paper: ClassVar[str] = "https://arxiv.org/abs/2506.15745"

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        scores = text_first(values.float().norm(dim=-1), prompt)
        if prompt.vision is None:
            return scores
        found = prompt.frame_tokens or (0,) * len(prompt.lengths)
        for row, (length, budget) in enumerate(zip(prompt.lengths, prompt.budgets, strict=True)):
            columns = prompt.vision[row].nonzero()[:, 0]
            room = max(budget - (length - len(columns)), 0)
            chosen = self.least_redundant(keys[row, :, columns], self.frame_tokens or found[row], room)
            scores[row].scatter_(1, columns[chosen], 0.0)  # above all other vision tokens
        return scores

    def least_redundant(self, keys: torch.Tensor, frame_tokens: int, room: int) -> torch.Tensor:
        """Which vision tokens of a row, LongTensor (kv_heads, chosen), its room of `room` entries goes to first.
        keys (kv_heads, vision tokens, head_dim)."""
        kv_heads, tokens, _ = keys.shape
        frames = tokens // frame_tokens if frame_tokens else 0
        chosen = room - round((1 - self.tar) * room)
        if frames < 2 or not chosen:
            return torch.empty(kv_heads, 0, dtype=torch.long, device=keys.device)
        recent = max(1, int(self.recent * frames))
        whole = keys[:, : frames * frame_tokens].float().unflatten(1, (frames, frame_tokens))
        unit = F.normalize(whole, dim=-1)
        likeness = (unit[:, :-recent] * unit[:, -recent:].mean(1, keepdim=True)).sum(-1)  # mean of the cosines
        novelty = torch.full((kv_heads, tokens), float("inf"), device=keys.device)
        novelty[:, : (frames - recent) * frame_tokens] = -likeness.flatten(1)
        return top_indices(novelty[None], [chosen])[0]
