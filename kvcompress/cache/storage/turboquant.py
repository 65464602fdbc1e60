"""Entries in few bits, each packed by itself."""

from dataclasses import replace

import torch

from ...kernels.packed import has_kernels, pack, pack_behind, packed_decode
from ...kernels.turboquant import codec, turboquant_decode
from ...scoring.layer_view import Kept
from ..scope import joined, right_aligned
from .base import Storage
from .store import store


class TurboQuantStorage(Storage):
    """A dense or ragged storage of packed keys and values, bytes in place of numbers. An entry is packed when it comes
    and never again; a decode step attends to packed entries, with rotated queries.

    Args: as in `store`, and the `bits` of a number.
    """

    is_final = True
    decodes_in_place = True

    def __init__(self, keys, values, indices, pads, bits: int, room: int | None, total: int | None):
        self.dtype = keys.dtype
        self.codecs = tuple(codec(part.shape[3], bits, part.device) for part in (keys, values))
        self.inner = store(*pack(keys, values, self.codecs), indices, pads, room, total)

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def appended(self) -> int:
        return self.inner.appended

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        ends = self.inner.claim(keys.shape[2])
        packed = (part.view(-1, part.shape[-1]) for part in (self.inner.keys, self.inner.values))
        pack_behind(*packed, ends, keys, values, self.codecs)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(self.codecs, self.inner.read(), strict=True)
        return tuple(each.rotate_back(each.unpack(packed, self.dtype)) for each, packed in parts)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        pads = None if self.inner.decodes_in_place else self.inner.visible()  # segments have no unused slots
        if has_kernels(query.device) and (pads is None or query.device.type == "cpu"):
            return packed_decode(query, *self.inner.segments(), pads, self.codecs, scaling)
        return turboquant_decode(query, *self.inner.read(), self.inner.visible(), *self.codecs, scaling)

    def extend(self, kept: Kept, first: int) -> None:
        packed = pack(kept.keys, kept.values, self.codecs)
        self._put(joined(self.inner.kept(first), replace(kept, keys=packed[0], values=packed[1])))

    def forget(self, column: int, seen: int) -> None:
        kept = self.inner.kept(seen)
        self._put(replace(kept, indices=kept.indices.masked_fill(kept.indices == column, -1)))

    def _put(self, kept: Kept) -> None:
        kept = right_aligned(kept)
        self.inner = store(kept.keys, kept.values, kept.indices, None, None)

    def visible(self) -> torch.Tensor | None:
        return self.inner.visible()

    def columns(self, seen: int) -> torch.Tensor:
        return self.inner.columns(seen)

    def select(self, rows: torch.Tensor) -> None:
        self.inner.select(rows)

    def fork(self) -> "TurboQuantStorage":
        twin = super().fork()
        twin.inner = self.inner.fork()
        return twin

    def state(self) -> dict[str, object]:
        return {**super().state(), "codecs": [(each.dim, each.bits) for each in self.codecs]}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "TurboQuantStorage":
        codecs = tuple(codec(dim, bits, device) for dim, bits in state["codecs"])
        return super().of_state({**state, "codecs": codecs}, device)

    def tensors(self) -> list[torch.Tensor]:
        """Without rotations and codebooks, which all layers would share."""
        return self.inner.tensors()

    @property
    def room_nbytes(self) -> int:
        return self.inner.room_nbytes
