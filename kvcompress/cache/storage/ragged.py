"""Entries of which rows and KV heads keep different numbers, without padding."""

import torch

from ...kernels.ragged_decode import ragged_decode
from ...scoring.layer_view import Kept
from .base import Storage, lasting, spare


class RaggedStorage(Storage):
    """One flat buffer (entries, head_dim) for keys and one for values; each row and KV head is a segment of it, with
    spare rows at its end. A decode write is one `index_copy_` of batch * kv_heads rows, and a decoded token attends
    to the segments where they lie.

    Args:
        kept: right-aligned, with -1 in unused slots.
        counts: LongTensor (batch, kv_heads), entries in use; `flat` is the same as a list, so that no later step has
            to ask the device.
    """

    decodes_in_place = True

    def __init__(self, kept: Kept, counts: torch.Tensor, flat: list[int], room: int | None):
        self.entries = self.length = max(flat)
        self.appended = 0
        self.counts, self.flat = counts, flat
        used = kept.indices >= 0
        self.indices = kept.indices[used].to(torch.int32)
        self._place(kept.keys[used], kept.values[used], spare(self.entries) if room is None else room)

    def _place(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        """Write segments (entries in use, head_dim), row by row and head by head, with `room` behind each."""
        self.room = room
        size = (self.counts + self.appended).flatten()
        ends = (size + room).cumsum(0)
        self.starts = (ends - room - size).view_as(self.counts)
        # Entry i of the packed order lies behind the room of all segments before its own.
        total = len(keys)
        segment = torch.repeat_interleave(size, output_size=total)
        rows = torch.arange(total, device=keys.device) + segment * room
        capacity = total + room * size.numel()
        self.keys = lasting(keys.new_zeros, (capacity, keys.shape[1])).index_copy_(0, rows, keys)
        self.values = lasting(values.new_zeros, (capacity, values.shape[1])).index_copy_(0, rows, values)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = keys.shape[2]
        if new > self.room:
            self._grow(spare(self.length) + new)
        ends = self.starts + self.counts + self.appended
        rows = (ends[..., None] + torch.arange(new, device=ends.device)).flatten()
        self.keys.index_copy_(0, rows, keys.reshape(-1, keys.shape[3]))
        self.values.index_copy_(0, rows, values.reshape(-1, values.shape[3]))
        self.appended += new
        self.length += new
        self.room -= new

    def _grow(self, room: int) -> None:
        used, rows = self._rows()
        rows = rows[used]
        self._place(self.keys[rows], self.values[rows], room)

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots are in use, and the buffer row of each: (batch, kv_heads, length)."""
        size = self.counts + self.appended
        slot = torch.arange(self.length, device=size.device) - (self.length - size)[..., None]
        return slot >= 0, self.starts[..., None] + slot.clamp(min=0)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, rows = self._rows()
        rows = rows.clamp(max=len(self.keys) - 1)  # an empty segment without room may begin behind the buffer's end
        return self.keys[rows], self.values[rows]

    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """As in `DenseStorage`."""
        return self.keys, self.values, self.starts, self.counts + self.appended, self.length

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        sizes = [rows for length in self.flat for rows in (length + self.appended, self.room)]
        return ragged_decode(query, self.keys, self.values, self.starts, self.counts + self.appended, sizes, scaling)

    def visible(self) -> torch.Tensor:
        return self._rows()[0]

    def columns(self, seen: int) -> torch.Tensor:
        used, _ = self._rows()
        shape = (*self.counts.shape, self.appended)
        kept = torch.full((*self.counts.shape, self.entries), -1, device=self.keys.device)
        kept[used[..., : self.entries]] = self.indices.long()
        new = torch.arange(seen - self.appended, seen, device=self.keys.device).expand(shape)
        return torch.cat([kept, new], dim=2)

    def select(self, rows: torch.Tensor) -> None:
        used, buffer_rows = self._rows()
        used, buffer_rows = used[rows], buffer_rows[rows]
        kept = torch.full((*self.counts.shape, self.entries), -1, device=self.keys.device, dtype=torch.int32)
        kept[self._rows()[0][..., : self.entries]] = self.indices
        heads = self.counts.shape[1]
        self.flat = [n for row in rows.tolist() for n in self.flat[row * heads : (row + 1) * heads]]
        self.counts = self.counts[rows]
        self.indices = kept[rows][used[..., : self.entries]]
        packed = buffer_rows[used]
        self._place(self.keys[packed], self.values[packed], self.room)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.indices, self.counts, self.starts]

    @property
    def room_nbytes(self) -> int:
        spare_rows = self.room * self.counts.numel()
        return self.keys[:spare_rows].nbytes + self.values[:spare_rows].nbytes
