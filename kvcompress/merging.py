"""What becomes of evicted entries where they are not simply dropped: each is merged into a kept one."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .prompt import Kept, Prompt
from .scoring import pad_columns

BLOCK = 256  # evicted entries whose similarities to all kept ones are held at once


def merge_evicted(kept: Kept, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt, merge: str) -> Kept:
    """`kept` with every evicted entry of keys and values (batch, kv_heads, keys, head_dim) merged into the kept entry
    of its row and KV head whose key is most like its own (cosine); its value goes into that entry's value.

    `merge` names how (`MERGES`). With `prompt.merge_modality="same"` an entry is only merged into one of its
    own kind, vision or text, and dropped where none is kept.
    """
    shares = MERGES[merge]
    used = kept.indices >= 0
    evicted = _all_but(kept.indices, keys.shape[2])
    if prompt.padding is not None:
        evicted &= ~pad_columns(prompt.padding, keys.shape[2])
    kept_keys, kept_values = kept.keys.float(), kept.values.float()
    kept_directions = F.normalize(kept_keys, dim=-1)
    new_keys, new_values = kept_keys.clone(), kept_values.clone()
    total = torch.ones_like(kept_keys[..., :1])  # entries that each kept one is the mean of, itself included
    for start in range(0, keys.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        gone = evicted[..., block]
        if not gone.any():
            continue
        block_keys, block_values = keys[:, :, block].float(), values[:, :, block].float()
        alike = F.normalize(block_keys, dim=-1) @ kept_directions.transpose(2, 3)
        alike = alike.masked_fill(~used[:, :, None], -torch.inf)
        if prompt.merge_modality == "same" and prompt.vision is not None:
            of_kept = prompt.vision[:, None].expand(keys.shape[:3]).gather(2, kept.indices.clamp(min=0))
            other = prompt.vision[:, None, block, None] != of_kept[:, :, None]
            alike = alike.masked_fill(other, -torch.inf)
        likeness, target = alike.max(-1)
        gone = gone & likeness.isfinite()
        for new, old, states in ((new_keys, kept_keys, block_keys), (new_values, kept_values, block_values)):
            rows = target.unsqueeze(-1).expand_as(states)
            part = shares(states, old.gather(2, rows), likeness.unsqueeze(-1))
            new.scatter_add_(2, rows, part.masked_fill(~gone.unsqueeze(-1), 0.0))
        total.scatter_add_(2, target.unsqueeze(-1), gone.float().unsqueeze(-1))
    return Kept((new_keys / total).to(keys.dtype), (new_values / total).to(values.dtype), kept.indices, kept.memory)


def _all_but(indices: torch.Tensor, columns: int) -> torch.Tensor:
    """bool (batch, kv_heads, columns), False at the indices; -1 marks nothing."""
    mask = torch.ones(*indices.shape[:2], columns + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, indices.masked_fill(indices < 0, columns), False)[..., :columns]


def average(evicted: torch.Tensor, kept: torch.Tensor, likeness: torch.Tensor) -> torch.Tensor:
    """The kept entry becomes the mean of itself and what is merged into it (LOOK-M,
    https://arxiv.org/abs/2406.18139, section 3.3, averaged merging)."""
    return evicted


def pivot(evicted: torch.Tensor, kept: torch.Tensor, likeness: torch.Tensor) -> torch.Tensor:
    """As `average`, but every entry is first averaged with the kept one (LOOK-M, pivotal merging)."""
    return (evicted + kept) / 2


def weighted(evicted: torch.Tensor, kept: torch.Tensor, likeness: torch.Tensor) -> torch.Tensor:
    """As `average`, with every entry weighted by its cosine similarity (LOOK-M, weighted merging)."""
    return evicted * likeness


# name -> what an evicted entry adds, (batch, kv_heads, block, head_dim), to the kept entry that it is merged into
MERGES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "average": average,
    "pivot": pivot,
    "weighted": weighted,
}
