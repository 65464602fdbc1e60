"""Entries as 8-bit floats."""

import torch

from ...device import runs_triton
from ...kernels.fp8 import pack, scale_of, unpack
from ...scoring.layer_view import all_slots
from .packed import PackedStorage
from .store import store


class Fp8Storage(PackedStorage):
    """Numbers as 8-bit floats (e4m3) under two scales, one of keys and one of values.

    As in transformers' `Fp8QuantizedLayer`, a scale is that of the entries that are stored first, over all rows and
    heads, and holds for those that follow. On CUDA a kernel attends to the entries in place; elsewhere they are read
    back in full precision.

    Args: as in `store`.
    """

    def __init__(self, keys, values, indices, pads, room: int | None, totals: list[int] | None):
        self.dtype = keys.dtype
        used = (keys, values)
        if indices is not None and totals != all_slots(indices):  # unused slots hold anything
            used = (part.masked_fill(indices[..., None] < 0, 0) for part in used)
        self.scales = tuple(scale_of(part) for part in used)
        self.inner = store(*self.pack(keys, values), indices, pads, room, totals)

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(pack(part, scale) for part, scale in zip((keys, values), self.scales, strict=True))

    @property
    def decodes_in_place(self) -> bool:
        return runs_triton(self.inner.keys.device) and (self.inner.decodes_in_place or self.inner.fills_all_slots)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not runs_triton(keys.device):
            return super().append(keys, values)
        from ...kernels.fp8_triton import pack_behind_triton

        ends, first = self.inner.claim(keys.shape[2])
        packed = (part.view(-1, part.shape[-1]) for part in (self.inner.keys, self.inner.values))
        pack_behind_triton(*packed, ends, first, keys, values, self.scales)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        from ...kernels.ragged_decode_triton import ragged_decode_triton

        segments, behind = self.inner.segments(), self.inner.behind
        return ragged_decode_triton(query, *segments, scaling, scales=self.scales, appended=behind)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(self.inner.read(), self.scales, strict=True)
        return tuple(unpack(packed, scale, self.dtype) for packed, scale in parts)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self.scales]
