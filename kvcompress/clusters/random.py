"""Random eviction: the baseline that every method has to beat."""

import zlib
from dataclasses import dataclass

import torch
from pydantic import NonNegativeInt

from .base import KVCluster, Prompt, register_method


@register_method("random")
@dataclass(frozen=True)
class RandomKVCluster(KVCluster):
    """Keeps a uniformly random set per layer and KV head, and the last `window_size` tokens.

    The draw follows `seed`, the layer and the row's own tokens, so it is the same alone, in any batch and on any
    device, and differs from prompt to prompt and from one eviction to the next.
    """

    seed: int = 0
    window_size: NonNegativeInt = 8

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        batch, kv_heads, columns, _ = keys.shape
        scores = torch.zeros(batch, kv_heads, columns)
        for row, length in enumerate(prompt.lengths):
            tokens = prompt.tokens[row] if prompt.tokens else length
            key = f"{self.seed} {prompt.layer_idx} {prompt.row_seeds[row]} {tokens}"
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            scores[row, :, columns - length :] = torch.rand(kv_heads, length, generator=generator)
        if self.window_size:
            scores[:, :, -self.window_size :] = float("inf")
        return scores.to(keys.device)
