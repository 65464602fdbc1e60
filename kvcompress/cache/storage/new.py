"""Which storage a layer gets. All have room for the tokens to come, so that a decoded token is written in place."""

import torch

from ...policy.options import Engine
from ...scoring.layer_view import Kept
from .base import Storage
from .dense import DenseStorage
from .offloaded import OffloadedStorage
from .quantized import QuantizedStorage
from .ragged import RaggedStorage
from .static import StaticStorage


def new_storage(
    engine: Engine,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    pads: torch.Tensor | None,
    room: int | None,
    uniform: bool,
) -> Storage:
    """The storage that `cache_implementation` names, with room for `room` tokens (None: an eighth more). `indices` is
    None for a cache that keeps everything, which may hold `pads`; other arguments as in `DenseStorage` and `store`."""
    kind, device = engine.cache_implementation, keys.device
    if kind.startswith("offloaded"):
        keys, values, indices, pads = (None if t is None else t.cpu() for t in (keys, values, indices, pads))
    if kind in ("static", "offloaded_static"):
        storage = StaticStorage(keys, values, indices, pads, room)
    elif kind == "quantized":
        storage = QuantizedStorage(keys, values, indices, pads, engine.quantizer, engine.kv_residual)
    elif indices is None:
        storage = DenseStorage(keys, values, None, pads, room)
    else:
        storage = store(Kept(keys, values, indices), room, uniform)
    return OffloadedStorage(storage, device) if kind.startswith("offloaded") else storage


def store(kept: Kept, room: int | None, uniform: bool) -> Storage:
    """Store what was kept, with room for `room` tokens. `uniform`: the caller knows that no slot is unused;
    otherwise the lengths are counted, which synchronises with the device."""
    if uniform:
        return DenseStorage(kept.keys, kept.values, kept.indices, None, room)
    counts = (kept.indices >= 0).sum(-1)
    lengths = counts.tolist()
    flat = [length for row in lengths for length in row]
    if min(flat) == max(flat):
        unused = kept.indices.shape[2] - flat[0]
        return DenseStorage(*(part[:, :, unused:] for part in (kept.keys, kept.values, kept.indices)), None, room)
    return RaggedStorage(kept, counts, flat, room)
