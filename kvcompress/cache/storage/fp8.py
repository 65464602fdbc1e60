"""Entries as 8-bit floats."""

import torch

from ...kernels.fp8 import pack, scale_of, unpack
from .packed import PackedStorage
from .store import store


class Fp8Storage(PackedStorage):
    """Numbers as 8-bit floats (e4m3) under two scales, one of keys and one of values.

    As in transformers' `Fp8QuantizedLayer`, a scale is that of the entries that are stored first, over all rows and
    heads, and holds for those that follow. Entries are read back in full precision.

    Args: as in `store`.
    """

    def __init__(self, keys, values, indices, pads, room: int | None, total: int | None):
        self.dtype = keys.dtype
        used = (keys, values)
        if indices is not None and total != indices.numel():  # unused slots hold anything
            used = (part.masked_fill(indices[..., None] < 0, 0) for part in used)
        self.scales = tuple(scale_of(part) for part in used)
        self.inner = store(*self.pack(keys, values), indices, pads, room, total)

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(pack(part, scale) for part, scale in zip((keys, values), self.scales, strict=True))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(self.inner.read(), self.scales, strict=True)
        return tuple(unpack(packed, scale, self.dtype) for packed, scale in parts)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self.scales]
