"""Random eviction: the baseline that every method has to beat."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt

from ..methods import register_method
from ..scoring.budget import effivlm_window
from ..scoring.layer_view import Prompt, uniform_noise
from ..scoring.windows import protect_recent
from .base import KVCluster


@register_method("random")
@dataclass(frozen=True)
class RandomKVCluster(KVCluster):
    """Keeps a uniformly random set per layer and KV head, and the last `window_size` tokens; `variant="effivlm"` the
    last tenth of the budget.

    The draw follows `seed`, the layer and the row's own tokens, so it is the same alone, in any batch and on any
    device, and differs from prompt to prompt and from one eviction to the next.
    """

    seed: int = 0
    window_size: NonNegativeInt = 8
    variant: Literal["paper", "effivlm"] = "paper"

    mixes_heads: ClassVar[bool] = True  # one draw for all

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        return uniform_noise(prompt, keys.shape[1], keys.shape[2], self.seed).to(keys.device)

    def prepared(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        windows = [effivlm_window(n) if self.variant == "effivlm" else self.window_size for n in prompt.budgets]
        return super().prepared(protect_recent(scores, windows), prompt)
