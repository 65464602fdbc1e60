"""Uncompressed storage: dense if every row and KV head keeps equally many entries, otherwise ragged."""

import torch

from ...scoring.layer_view import Kept, all_slots
from .base import Storage
from .dense import DenseStorage
from .ragged import RaggedStorage


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    pads: torch.Tensor | None,
    room: int | None,
    totals: list[int] | None = None,
) -> Storage:
    """Store the kept entries, with room for `room` tokens; arguments as in `DenseStorage`.

    `totals` are each row's slots in use. If they are None they are counted, which waits for the device."""
    if indices is None or totals == all_slots(indices):
        return DenseStorage(keys, values, indices, pads, room)
    counts = (indices >= 0).sum(-1)
    if totals is not None and indices.device.type == "cuda":
        return RaggedStorage(Kept(keys, values, indices, totals=totals), counts, None, room)
    flat = counts.flatten().tolist()
    if min(flat) == max(flat):
        unused = indices.shape[2] - flat[0]
        return DenseStorage(*(part[:, :, unused:] for part in (keys, values, indices)), None, room)
    return RaggedStorage(Kept(keys, values, indices), counts, flat, room)
