"""SimLayerKV: lazy layers keep little. https://arxiv.org/abs/2410.13846"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeInt

from .base import KVCluster, Prompt, register_method
from .streamingllm import sinks_and_recent


@register_method("simlayerkv")
@dataclass(frozen=True)
class SimLayerKVCluster(KVCluster):
    """Keeps the first `sinks` tokens and the most recent ones, few of them in layers whose attention is lazy
    (section 3, `layer_budget="lazy"`).

    In the paper a lazy layer keeps 4 + 1024 tokens and every other layer all. Here the sum over the layers is the
    budget that was asked for: what lazy layers give up goes to the others, as many tokens as fit.
    """

    sinks: NonNegativeInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.13846"
    layer_budget: ClassVar[str] = "lazy"

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        return sinks_and_recent(keys, self.sinks, prompt.padding)
