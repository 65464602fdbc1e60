"""Entries as they are: dense where every row and KV head keeps as many, else ragged."""

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
    uniform: bool = False,
) -> Storage:
    """Store what was kept, with room for `room` tokens; arguments as in `DenseStorage`. `uniform`: the caller knows
    that no slot is unused; otherwise the lengths are counted, which synchronises with the device."""
    if indices is None or uniform:
        return DenseStorage(keys, values, indices, pads, room)
    counts = (indices >= 0).sum(-1)
    lengths = counts.tolist()
    flat = [length for row in lengths for length in row]
    if min(flat) == max(flat):
        unused = indices.shape[2] - flat[0]
        return DenseStorage(*(part[:, :, unused:] for part in (keys, values, indices)), None, room)
    return RaggedStorage(Kept(keys, values, indices), counts, flat, room)
