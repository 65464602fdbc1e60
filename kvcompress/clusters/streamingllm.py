"""StreamingLLM: attention sinks and the most recent tokens. https://arxiv.org/abs/2309.17453"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeInt

from .base import KVCluster, Prompt, register_method


@register_method("streamingllm")
@dataclass(frozen=True)
class StreamingLLMKVCluster(KVCluster):
    """Keeps the first `sinks` tokens and the most recent ones (section 3.2; 4 sinks as published).

    Kept keys keep their rotary positions; the paper re-assigns them inside the cache. Where the budget has no room
    for all sinks, the last token stays and the first sinks fill the rest.
    """

    sinks: NonNegativeInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        columns = keys.shape[2]
        position = torch.arange(columns, device=keys.device, dtype=torch.float32)
        if prompt.padding is not None:
            position = position - prompt.padding[..., None]  # 0 at the first real token
        # Recent tokens rank by position, sinks above them in order, the last token above all.
        score = torch.where(position < self.sinks, 2 * columns - position, position)
        score[..., -1] = float("inf")
        return score.expand(keys.shape[:3])
