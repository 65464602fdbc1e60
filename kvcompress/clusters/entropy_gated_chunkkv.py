"""Entropy-gated ChunkKV: whole chunks, except those that owe their score to few tokens.
https://arxiv.org/abs/2502.00299"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt

from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import ranks
from ..scoring.windows import aligned_left, aligned_right
from .snapkv import WindowKVCluster

EPSILON = 1e-8  # as in kvpress


@register_method("entropy-gated-chunkkv")
@dataclass(frozen=True)
class EntropyGatedChunkKVCluster(WindowKVCluster):
    """ChunkKV with the gate that kvpress 0.5.5 adds for chunks that owe their score to a few tokens.

    A chunk of `chunk_size` tokens is gated if its mean score is at least the median of all chunks and the entropy of
    its scores is below the median. Of a gated chunk, only the `spiky_size` tokens with the highest scores are kept at
    first. Chunks are taken by their mean of SnapKV's scores, the same for all heads. After all chunks, the remaining
    tokens of gated ones follow by their scores.

    Chunks are counted from a row's first token. Tokens of the observation window score one above the highest of all.
    The budget is exact: if the last chunk only fits in part, its tokens with the highest scores stay.
    """

    chunk_size: PositiveInt = 10
    spiky_size: PositiveInt = 4

    paper: ClassVar[str] = "https://arxiv.org/abs/2502.00299"
    head_budget: ClassVar[str] = "shared"
    mixes_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spiky_size >= self.chunk_size:
            raise KVCompressError(f"spiky_size={self.spiky_size} is not below chunk_size={self.chunk_size}")

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = super().score(queries, keys, values, view)
        is_window, real = scores.isinf(), view.real_columns(keys).expand_as(scores)
        highest = scores.masked_fill(is_window | ~real, 0.0).amax((1, 2), keepdim=True)
        scores = torch.where(is_window, highest + 1, scores)
        if (view.settings.head_budget or self.head_budget) == "shared":
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        scores, real = aligned_left(scores, view.padding), aligned_left(real, view.padding)
        return -aligned_right(turns(scores, real, self.chunk_size, self.spiky_size).float(), view.padding)


def turns(scores: torch.Tensor, real: torch.Tensor, size: int, spiky: int) -> torch.Tensor:
    """Return the order in which tokens are kept, LongTensor (..., tokens), the smallest first.

    Args:
        scores: (..., tokens), none below 0; chunks of `size` are counted from the first.
        real: bool (..., tokens), False after the last token.
    """
    tokens = scores.shape[-1]
    behind = (0, -tokens % size)
    # In double: else the order in which a device sums decides between chunks of equal scores.
    chunks = F.pad(scores.double().masked_fill(~real, 0.0), behind).unflatten(-1, (-1, size))
    real = F.pad(real, behind).unflatten(-1, (-1, size))
    count = real.sum(-1)
    mean = chunks.sum(-1) / count.clamp(min=1)
    shares = chunks / (chunks.sum(-1, keepdim=True) + EPSILON)
    entropy = -(shares * (shares + EPSILON).log()).sum(-1) / count.clamp(min=2).log()
    entropy = entropy.clamp(0, 1).masked_fill(count == 1, 0.0)
    gated = (mean >= median(mean, count > 0)) & (entropy < median(entropy, count > 0))
    order = ranks(mean.masked_fill(count == 0, -torch.inf))
    within = ranks(chunks.masked_fill(~real, -torch.inf))
    first = order[..., None] * size + within
    # Count the row's own chunks, not those of the batch: merging depends on the differences between scores.
    behind_all = (count > 0).sum(-1)[..., None, None] * size
    later = behind_all + ranks(chunks.masked_fill(~real, -torch.inf).flatten(-2)).view(chunks.shape)
    turn = torch.where(gated[..., None] & (within >= spiky), later, first)
    return turn.flatten(-2)[..., :tokens]


def median(numbers: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the (lower) median of the counted numbers (..., n) along the last dimension: (..., 1)."""
    ascending = numbers.masked_fill(~counted, torch.inf).sort(-1).values
    return ascending.gather(-1, (counted.sum(-1, keepdim=True) - 1).clamp(min=0) // 2)
