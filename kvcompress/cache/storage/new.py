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
    kind = engine.cache_implementation
    if kind.startswith("offloaded"):
        return _offloaded(kind, keys, values, indices, pads, room, totals)
    if kind == "static":
        return StaticStorage(keys, values, indices, pads, room)
    if kind == "quantized" and engine.kv_backend == "turboquant":
        return TurboQuantStorage(keys, values, indices, pads, engine.kv_bits, room, totals)
    if kind == "quantized" and engine.kv_backend == "fp8":
        return Fp8Storage(keys, values, indices, pads, room, totals)
    if kind == "quantized":
        return QuantizedStorage(keys, values, indices, pads, engine.quantizer, engine.kv_residual, totals)
    if kind == "think":
        return ThinKStorage(keys, values, indices, pads, channels, engine.key_recent, room, totals)
    return store(keys, values, indices, pads, room, totals)


def _offloaded(kind: str, keys, values, indices, pads, room: int | None, totals) -> OffloadedStorage:
    """Create the storage of entries in CPU memory. On CUDA they move there without a wait, if the host knows sizes."""
    device, limit = keys.device, room if kind == "offloaded_static" else None
    if device.type == "cuda":
        room = 0  # new tokens wait on the device, and room would be copied to it in every step
    if device.type in ("cuda", "cpu") and (indices is None or totals == all_slots(indices)):
        return OffloadedStorage(store(keys, values, indices, pads, room, totals), device, limit)
    if totals is not None and device.type == "cuda":
        parts = [lasting(part.to, "cpu", non_blocking=True) for part in (keys, values, indices)]  # into pinned memory
        return OffloadedStorage(partial(store, *parts, pads, room, totals), device, limit)
    keys, values, indices, pads = (None if part is None else part.cpu() for part in (keys, values, indices, pads))
    return OffloadedStorage(store(keys, values, indices, pads, room, totals), device, limit)
