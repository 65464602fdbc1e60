"""StreamingLLM: attention sinks and the most recent tokens. https://arxiv.org/abs/2309.17453"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt

from ..budget import effivlm_window
from ..scoring import protect_recent
from .base import KVCluster, Prompt, register_method


@register_method("streamingllm")
@dataclass(frozen=True)
class StreamingLLMKVCluster(KVCluster):
    """Keeps the first `sinks` tokens and the most recent ones (section 3.2; 4 sinks as published).
    `variant="effivlm"`: the most recent tokens get a tenth of the budget, the first tokens the rest.

    Kept keys keep their rotary positions; the paper re-assigns them inside the cache. Where the budget has no room
    for all sinks, the last token stays and the first sinks fill the rest.
    """

    sinks: NonNegativeInt = 4
    variant: Literal["paper", "effivlm"] = "paper"

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        columns = keys.shape[2]
        position = torch.arange(columns, device=keys.device, dtype=torch.float32)
        if prompt.padding is not None:
            position = position - prompt.padding[..., None]  # 0 at the first real token
        # Recent tokens rank by position, sinks above them in order; here every token may be a sink.
        sinks = columns if self.variant == "effivlm" else self.sinks
        return torch.where(position < sinks, 2 * columns - position, position).expand(keys.shape[:3])

    def prepared(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        recent = [effivlm_window(n) if self.variant == "effivlm" else 1 for n in prompt.budgets]
        return super().prepared(protect_recent(scores, recent), prompt)
