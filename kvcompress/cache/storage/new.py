"""Creates a layer's storage. Every storage has room for new tokens, so that a decoded token is written in place."""

from functools import partial

import torch

from ...policy.options import Engine
from ...scoring.layer_view import all_slots
from .base import Storage, lasting
from .fp8 import Fp8Storage
from .offloaded import OffloadedStorage
from .quantized import QuantizedStorage
from .static import StaticStorage
from .store import store
from .think import ThinKStorage
from .turboquant import TurboQuantStorage


def new_storage(
    engine: Engine,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    pads: torch.Tensor | None,
    room: int | None,
    totals: list[int] | None,
    channels: torch.Tensor | None = None,
) -> Storage:
    """Create the storage that `cache_implementation` names, with room for `room` tokens (None: an eighth more).

    `indices` is None for a cache that keeps everything, which may hold `pads`; `channels` is as in `ThinKStorage`, for
    `think`; other arguments are as in `DenseStorage` and `store`."""
    kind, device = engine.cache_implementation, keys.device
    if kind == "offloaded" and device.type == "cuda":
        room = 0  # new tokens wait on the device, and room would be copied to it in every step
    is_dense = indices is None or totals == all_slots(indices)
    if kind == "offloaded" and not is_dense and totals is not None and device.type == "cuda":
        parts = [lasting(part.to, "cpu", non_blocking=True) for part in (keys, values, indices)]  # into pinned memory
        return OffloadedStorage(partial(store, *parts, pads, room, totals), device)
    if kind.startswith("offloaded") and not (kind == "offloaded" and is_dense):  # dense ones move without a wait
        keys, values, indices, pads = (None if t is None else t.cpu() for t in (keys, values, indices, pads))
    if kind in ("static", "offloaded_static"):
        storage = StaticStorage(keys, values, indices, pads, room)
    elif kind == "quantized" and engine.kv_backend == "turboquant":
        storage = TurboQuantStorage(keys, values, indices, pads, engine.kv_bits, room, totals)
    elif kind == "quantized" and engine.kv_backend == "fp8":
        storage = Fp8Storage(keys, values, indices, pads, room, totals)
    elif kind == "quantized":
        storage = QuantizedStorage(keys, values, indices, pads, engine.quantizer, engine.kv_residual, totals)
    elif kind == "think":
        storage = ThinKStorage(keys, values, indices, pads, channels, engine.key_recent, room, totals)
    else:
        storage = store(keys, values, indices, pads, room, totals)
    return OffloadedStorage(storage, device) if kind.startswith("offloaded") else storage
