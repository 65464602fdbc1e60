"""Uncompressed storage: dense if every row and KV head keeps equally many entries, otherwise ragged."""

import torch

from ...scoring.layer_view import Kept
from .base import Storage
from .dense import DenseStorage
from .ragged import RaggedStorage


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    pads: torch.Tensor | None,
    room: int | None,
    total: int | None = None,
) -> Storage:
    """Store the kept entries, with room for `room` tokens; arguments as in `DenseStorage`.

    `total` is the number of slots in use over all rows and heads. If it is None they are counted, which waits for the
    device."""
    if indices is None or total == indices.numel():
        return DenseStorage(keys, values, indices, pads, room)
    counts = (indices >= 0).sum(-1)
    if total is not None and indices.device.type == "cuda":
        return RaggedStorage(Kept(keys, values, indices, total=total), counts, None, room)
    flat = counts.flatten().tolist()
    if min(flat) == max(flat):
        unused = indices.shape[2] - flat[0]
        return DenseStorage(*(part[:, :, unused:] for part in (keys, values, indices)), None, room)
    return RaggedStorage(Kept(keys, values, indices, total=sum(flat)), counts, flat, room)
