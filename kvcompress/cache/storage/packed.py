"""`PackedStorage`, the common part of storages that hold each entry as bytes."""

from abc import abstractmethod
from dataclasses import replace

import torch

from ...scoring.layer_view import Kept
from ..scope import joined, right_aligned
from .base import Storage
from .dense import DenseStorage
from .ragged import RaggedStorage
from .store import store


class PackedStorage(Storage):
    """A dense or ragged storage, `inner`, of packed keys and values: bytes in place of numbers. An entry is packed
    once, when it is stored."""

    is_final = True
    inner: DenseStorage | RaggedStorage

    @abstractmethod
    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (..., head_dim) as uint8 (..., bytes of a vector)."""

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def appended(self) -> int:
        return self.inner.appended

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.inner.append(*self.pack(keys, values))

    def extend(self, kept: Kept, first: int) -> None:
        keys, values = self.pack(kept.keys, kept.values)
        self._put(joined(self.inner.kept(first), replace(kept, keys=keys, values=values)))

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
