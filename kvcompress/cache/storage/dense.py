"""Dense storage: every row and KV head keeps equally many entries."""

from functools import lru_cache

import torch

from .base import Storage, columns_of, lasting, roomy, rows_of, spare


class DenseStorage(Storage):
    """One buffer (batch, kv_heads, capacity, head_dim) for keys and one for values.

    Args:
        keys, values: (batch, kv_heads, entries, head_dim).
        indices: LongTensor (batch, kv_heads, entries), or None for column = slot.
        pads: bool (batch, entries), True at pads, which are stored but never attended to; or None. Only a cache that
            keeps everything stores pads, so that all shapes equal those of transformers' own cache.
        room: new tokens to allocate room for; None: an eighth more.
    """

    def __init__(self, keys, values, indices, pads, room: int | None):
        self.entries = self.length = keys.shape[2]
        self.indices = None if indices is None else indices.to(torch.int32)
        self.pads = pads
        capacity = self.entries + (spare(self.entries) if room is None else room)
        self.keys, self.values = roomy(keys, capacity), roomy(values, capacity)

    @property
    def is_whole(self) -> bool:
        return self.indices is None

    @property
    def fills_all_slots(self) -> bool:
        return self.pads is None

    @property
    def appended(self) -> int:
        return self.length - self.entries

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        begin = self.reserve(keys.shape[2])
        self.keys[:, :, begin : self.length] = keys
        self.values[:, :, begin : self.length] = values

    def claim(self, new: int) -> tuple[torch.Tensor, int]:
        """Reserve room for `new` tokens, which the caller writes.

        Returns rows of the flat buffers (`segments`), LongTensor (batch * kv_heads,), and how many rows behind them the
        room of each KV head of each row of the batch begins."""
        begin = self.reserve(new)
        return self._starts()[0].flatten(), begin

    def reserve(self, new: int) -> int:
        """Add `new` to the length, and return the length before; the caller writes them. Buffers without room for them
        are copied."""
        begin, end = self.length, self.length + new
        if end > self.keys.shape[2]:
            self.keys = roomy(self.keys[:, :, :begin], end + spare(end))
            self.values = roomy(self.values[:, :, :begin], end + spare(end))
        self.length = end
        return begin

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def state(self) -> dict[str, object]:
        keys, values = self.read()
        return {**super().state(), "keys": keys, "values": values, "capacity": self.keys.shape[2]}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "DenseStorage":
        capacity = state.pop("capacity")
        return super().of_state(
            {**state, **{name: roomy(state[name], capacity) for name in ("keys", "values")}}, device
        )

    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return keys and values (rows, head_dim), each segment's first row and length, and the longest length.

        A segment is one KV head of one row of the batch; first rows and lengths, without the entries `behind`, are
        LongTensors (batch, kv_heads)."""
        return self.keys.flatten(0, 2), self.values.flatten(0, 2), *self._starts(), self.length

    @property
    def behind(self) -> int:
        """Entries of each segment that its length in `segments` does not count: all."""
        return self.length

    def _starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _starts(*self.keys.shape[:3], self.keys.device)

    def visible(self) -> torch.Tensor | None:
        if self.pads is None:
            return None
        new = self.pads.new_zeros(self.pads.shape[0], self.length - self.pads.shape[1])
        return ~torch.cat([self.pads, new], dim=1)[:, None]

    def columns(self, seen: int) -> torch.Tensor:
        return columns_of(self, self.keys, seen)

    def select(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.indices, self.pads = rows_of(self.indices, rows), rows_of(self.pads, rows)

    @property
    def room_nbytes(self) -> int:
        return self.keys[:, :, self.length :].nbytes + self.values[:, :, self.length :].nbytes


@lru_cache(maxsize=1024)  # layers may differ in capacity
def _starts(batch: int, kv_heads: int, capacity: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row of each segment and zeros, LongTensors (batch, kv_heads), the same for all layers."""
    starts = lasting(torch.arange, 0, batch * kv_heads * capacity, capacity, device=device).view(batch, kv_heads)
    return starts, lasting(torch.zeros_like, starts)
