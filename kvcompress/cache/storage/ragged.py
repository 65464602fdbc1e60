"""Entries of which rows and KV heads keep different numbers, without padding."""

import torch
import torch.nn.functional as F

from ...kernels.ragged_decode import ragged_decode
from ...scoring.layer_view import Kept
from .base import Storage, lasting, spare


class RaggedStorage(Storage):
    """One flat buffer (entries, head_dim) for keys and one for values; each row and KV head is a segment of it, with
    spare rows at its end. A decode write is one `index_copy_` of batch * kv_heads rows, and a decoded token attends
    to the segments where they lie.

    Args:
        kept: right-aligned, with -1 in unused slots, and with `total`.
        counts: LongTensor (batch, kv_heads), entries in use.
        flat: the same as a list, for a host that asks; None: not known yet, and read from the device when it is.
    """

    decodes_in_place = True

    def __init__(self, kept: Kept, counts: torch.Tensor, flat: list[int] | None, room: int | None):
        self.entries = self.length = kept.indices.shape[2] if flat is None else max(flat)
        self.appended = 0
        self._flat = flat
        # Stable: those in use come first, row by row and head by head.
        used = (kept.indices < 0).flatten().argsort(stable=True)[: kept.total]
        self.indices = kept.indices.flatten()[used].to(torch.int32)
        segments = counts.numel()
        room = spare(self.entries if flat else -(-kept.total // segments)) if room is None else room
        self._place(counts, kept.keys.flatten(0, 2)[used], kept.values.flatten(0, 2)[used], room)

    @property
    def sizes(self) -> torch.Tensor:
        """Rows of each segment: LongTensor (batch, kv_heads). They lie from `starts` to `ends`."""
        return self.ends - self.starts

    @property
    def counts(self) -> torch.Tensor:
        """The same without those that were appended."""
        return self.sizes - self.appended

    @property
    def flat(self) -> list[int]:
        """`counts` for the host, row by row and head by head."""
        if self._flat is None:
            self._flat = self.counts.flatten().tolist()
        return self._flat

    def _place(self, sizes: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        """Write segments of these `sizes`, (entries in use, head_dim), with `room` behind each."""
        self.room = room
        self.ends = (sizes.flatten() + room).cumsum(0).view_as(sizes) - room
        self.starts = self.ends - sizes
        rows = self._packed_rows(len(keys))
        capacity = len(keys) + room * sizes.numel()
        self.keys = lasting(keys.new_zeros, (capacity, keys.shape[1])).index_copy_(0, rows, keys)
        self.values = lasting(values.new_zeros, (capacity, values.shape[1])).index_copy_(0, rows, values)

    def _packed_rows(self, total: int) -> torch.Tensor:
        """The buffer row of each of the `total` entries, row by row and head by head. Entry i of that order lies behind
        the room of all segments before its own."""
        segment = torch.repeat_interleave(self.sizes.flatten(), output_size=total)
        return torch.arange(total, device=segment.device) + segment * self.room

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = keys.shape[2]
        rows = self.claim(new)
        if new > 1:
            rows = (rows[:, None] + torch.arange(new, device=rows.device)).flatten()
        self.keys.index_copy_(0, rows, keys.reshape(-1, keys.shape[3]))
        self.values.index_copy_(0, rows, values.reshape(-1, values.shape[3]))

    def claim(self, new: int) -> torch.Tensor:
        """As in `DenseStorage`."""
        if new > self.room:
            self._grow(spare(self.length) + new)
        rows = self.ends.flatten()
        self.ends = self.ends + new  # a fork has the others
        self.appended += new
        self.length += new
        self.room -= new
        return rows

    def _grow(self, room: int) -> None:
        rows = self._packed_rows(len(self.indices) + self.appended * self.starts.numel())
        self._place(self.sizes, self.keys[rows], self.values[rows], room)

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots are in use, and the buffer row of each: (batch, kv_heads, length)."""
        slot = torch.arange(self.length, device=self.keys.device) - (self.length - self.sizes)[..., None]
        return slot >= 0, self.starts[..., None] + slot.clamp(min=0)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, rows = self._rows()
        rows = rows.clamp(max=len(self.keys) - 1)  # an empty segment without room may begin behind the buffer's end
        return self.keys[rows], self.values[rows]

    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """As in `DenseStorage`."""
        return self.keys, self.values, self.starts, self.sizes, self.length

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        return ragged_decode(query, *self.segments(), self._sizes, scaling)

    def _sizes(self) -> list[int]:
        return [rows for length in self.flat for rows in (length + self.appended, self.room)]

    def visible(self) -> torch.Tensor:
        return self._rows()[0]

    def columns(self, seen: int) -> torch.Tensor:
        kept = self._kept_columns()
        new = torch.arange(seen - self.appended, seen, device=kept.device).expand(*kept.shape[:2], -1)
        return torch.cat([kept, new], dim=2)

    def _kept_columns(self) -> torch.Tensor:
        """The columns of the slots without those that were appended: LongTensor (batch, kv_heads, entries)."""
        counts = self.counts
        ends = counts.flatten().cumsum(0).view_as(counts)  # in `indices`
        slot = torch.arange(self.entries, device=ends.device) - self.entries
        place = (ends[..., None] + slot).clamp(min=0)
        columns = F.pad(self.indices.long(), (0, 1))[place]  # an entry more, for segments without any
        return columns.masked_fill(slot < -counts[..., None], -1)

    def select(self, rows: torch.Tensor) -> None:
        used, buffer_rows = (each[rows] for each in self._rows())
        kept = self._kept_columns()[rows]
        self._flat = None
        sizes = self.sizes[rows]
        self.indices = kept[kept >= 0].to(torch.int32)
        packed = buffer_rows[used]
        self._place(sizes, self.keys[packed], self.values[packed], self.room)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.indices, self.starts, self.ends]

    @property
    def room_nbytes(self) -> int:
        spare_rows = self.room * self.starts.numel()
        return self.keys[:spare_rows].nbytes + self.values[:spare_rows].nbytes
