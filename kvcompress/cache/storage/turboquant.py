"""Entries in few bits, each packed by itself."""

import torch

from ...kernels.packed import has_kernels, pack, pack_behind, packed_decode
from ...kernels.turboquant import codec, turboquant_decode
from .packed import PackedStorage
from .store import store


class TurboQuantStorage(PackedStorage):
    """Vectors rotated and rounded, each with its norm. A decode step attends to packed entries, with rotated queries.

    The rotations and codebooks are not among `tensors`, since all layers share them.

    Args: as in `store`, and the `bits` of a number.
    """

    decodes_in_place = True

    def __init__(self, keys, values, indices, pads, bits: int, room: int | None, totals: list[int] | None):
        self.dtype = keys.dtype
        self.codecs = tuple(codec(part.shape[3], bits, part.device) for part in (keys, values))
        self.inner = store(*self.pack(keys, values), indices, pads, room, totals)

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pack(keys, values, self.codecs)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        ends, first = self.inner.claim(keys.shape[2])
        packed = (part.view(-1, part.shape[-1]) for part in (self.inner.keys, self.inner.values))
        pack_behind(*packed, ends, first, keys, values, self.codecs)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(self.codecs, self.inner.read(), strict=True)
        return tuple(each.rotate_back(each.unpack(packed, self.dtype)) for each, packed in parts)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        pads = None if self.inner.decodes_in_place else self.inner.visible()  # segments have no unused slots
        if has_kernels(query.device) and (pads is None or query.device.type == "cpu"):
            return packed_decode(query, *self.inner.segments(), pads, self.codecs, scaling, self.inner.behind)
        return turboquant_decode(query, *self.inner.read(), self.inner.visible(), *self.codecs, scaling)

    def state(self) -> dict[str, object]:
        return {**super().state(), "codecs": [(each.dim, each.bits) for each in self.codecs]}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "TurboQuantStorage":
        codecs = tuple(codec(dim, bits, device) for dim, bits in state["codecs"])
        return super().of_state({**state, "codecs": codecs}, device)
