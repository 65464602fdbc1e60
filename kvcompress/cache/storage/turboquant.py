"""Entries in few bits, each packed by itself."""

from dataclasses import replace

import torch

from ...kernels.ragged_decode import has_triton
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
        self.inner = store(*self._packed(keys, values), indices, pads, room, total)

    def _packed(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codecs[0].pack(keys), self.codecs[1].pack(values)

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def appended(self) -> int:
        return self.inner.appended

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.codecs[0] is self.codecs[1]:  # few of them: together they take half as many kernels
            self.inner.append(*self.codecs[0].pack(torch.stack([keys, values])))
        else:
            self.inner.append(*self._packed(keys, values))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(self.codecs, self.inner.read(), strict=True)
        return tuple(each.rotate_back(each.unpack(packed, self.dtype)) for each, packed in parts)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        visible = self.inner.visible()
        has_segments = visible is None or self.inner.decodes_in_place  # not so where pads are stored
        if query.device.type == "cuda" and has_triton() and has_segments:
            from ...kernels.ragged_decode_triton import ragged_decode_triton

            return ragged_decode_triton(query, *self.inner.segments(), scaling, codecs=self.codecs)
        return turboquant_decode(query, *self.inner.read(), visible, *self.codecs, scaling)

    def extend(self, kept: Kept, first: int) -> None:
        packed = self._packed(kept.keys, kept.values)
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
