"""How similar keys are to all other keys of their KV head, for R-KV (https://arxiv.org/abs/2505.24133, section 3).

Throughout, keys are (batch, kv_heads, keys, head_dim), `padding` is as in scoring/windows.py, and the result is (batch,
kv_heads, keys) in fp32."""

import torch
import torch.nn.functional as F

from ..device import runs_triton

BLOCK = 128  # keys compared with all others at once


def mean_likeness(
    keys: torch.Tensor, similar: float, padding: torch.Tensor | None, spares_first: bool = False
) -> torch.Tensor:
    """Return each key's mean cosine with the others, -inf at pads: on CUDA in Triton, otherwise in plain PyTorch.

    Each key leaves out the latest of the others whose cosine exceeds `similar`, if there is one; with `spares_first`,
    otherwise the first key."""
    if runs_triton(keys.device):
        from .likeness_triton import mean_likeness_triton

        return mean_likeness_triton(keys, similar, padding, spares_first)
    return mean_likeness_blocked(keys, similar, padding, spares_first)


def mean_likeness_blocked(
    keys: torch.Tensor, similar: float, padding: torch.Tensor | None, spares_first: bool = False
) -> torch.Tensor:
    """The reference in plain PyTorch, a block of keys at a time."""
    directions = F.normalize(keys.float(), dim=-1)
    count = keys.shape[2]
    column = torch.arange(count, device=keys.device)
    if padding is not None:
        pads = column < padding[..., None]
        directions = directions.masked_fill(pads[..., None], 0.0)
        count = (count - padding)[..., None]
    total = None
    for start in range(0, keys.shape[2], BLOCK):
        alike = directions[:, :, start : start + BLOCK] @ directions.transpose(2, 3)
        alike.diagonal(start, 2, 3).zero_()  # a key is not like itself
        latest = torch.where(alike > similar, column, 0 if spares_first else -1).amax(-1, keepdim=True)
        if spares_first and padding is not None:
            latest = latest.maximum(padding[..., None, None])
        of_rows = alike.masked_fill_(column == latest, 0.0).sum(2)
        total = of_rows if total is None else total + of_rows
    mean = total / count
    return mean if padding is None else mean.masked_fill(pads, -torch.inf)
