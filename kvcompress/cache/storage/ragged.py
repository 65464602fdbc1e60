"""Ragged storage: rows and KV heads keep different numbers of entries, without padding."""

import torch

from ...device import Arriving, runs_triton
from ...kernels.ragged_decode import ragged_decode
from ...scoring.layer_view import Kept
from .base import Storage, lasting, put, spare, with_appended


class RaggedStorage(Storage):
    """One flat buffer (entries, head_dim) for keys and one for values, with a segment per row and KV head.

    Spare rows follow each segment. A decode step attends to the segments in place; on CUDA the same kernel writes the
    new token, elsewhere one `index_copy_` has done so. On CUDA one kernel lays a choice out and one returns it, so that
    an eviction launches few.

    Args:
        kept: right-aligned, with -1 in unused slots.
        counts: LongTensor (batch, kv_heads), entries in use.
        flat: the same as a list; None: copied from the device when the host needs it, and `kept` has `totals`.
        room: as in `DenseStorage`.

    Attributes:
        starts, lengths: LongTensor (batch, kv_heads), each segment's first row, and its entries when it was placed.
        behind: tokens appended to every segment since.
    """

    decodes_in_place = True
    _new: tuple[torch.Tensor, torch.Tensor] | None = None  # a token that has not been written yet

    def __init__(self, kept: Kept, counts: torch.Tensor, flat: list[int] | None, room: int | None):
        self.entries = self.length = kept.indices.shape[2] if flat is None else max(flat)
        self.appended = 0
        self._flat = Arriving(counts) if flat is None else flat
        total = sum(kept.totals if flat is None else flat)
        room = spare(self.entries if flat else -(-total // counts.numel())) if room is None else room
        if runs_triton(counts.device):
            from ...kernels.ragged_layout_triton import to_segments

            self.room, self.lengths, self.behind = room, counts, 0
            dense = kept.keys, kept.values, kept.indices
            self.keys, self.values, self.indices, self.starts = lasting(to_segments, *dense, counts, total, room)
            return
        # Stable: slots in use come first, row by row and head by head.
        used = (kept.indices < 0).flatten().argsort(stable=True)[:total]
        self.indices = kept.indices.flatten()[used].to(torch.int32)
        segment = used // kept.indices.shape[2]
        self._place(counts, segment, kept.keys.flatten(0, 2)[used], kept.values.flatten(0, 2)[used], room)

    @property
    def sizes(self) -> torch.Tensor:
        """Rows in use of each segment: LongTensor (batch, kv_heads)."""
        return self.lengths + self.behind

    @property
    def counts(self) -> torch.Tensor:
        """`sizes` without appended tokens."""
        return self.sizes - self.appended

    @property
    def flat(self) -> list[int]:
        """`counts` on the host, row by row and head by head."""
        if isinstance(self._flat, Arriving):
            self._flat = self._flat.tolist()
        return self._flat

    def held(self) -> list[list[int]]:
        sizes, kv_heads = [count + self.appended for count in self.flat], self.starts.shape[1]
        return [sizes[first : first + kv_heads] for first in range(0, len(sizes), kv_heads)]

    def _place(
        self, sizes: torch.Tensor, segment: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, room: int
    ) -> None:
        """Write segments of these `sizes`, (entries in use, head_dim), each followed by `room` rows.

        `segment` holds each entry's segment."""
        self.room, self.lengths, self.behind = room, sizes, 0
        self.starts = (sizes.flatten() + room).cumsum(0).view_as(sizes) - room - sizes
        rows = self._packed_rows(segment)
        capacity = len(keys) + room * sizes.numel()
        self.keys = lasting(keys.new_zeros, (capacity, keys.shape[1])).index_copy_(0, rows, keys)
        self.values = lasting(values.new_zeros, (capacity, values.shape[1])).index_copy_(0, rows, values)

    def _packed_rows(self, segment: torch.Tensor) -> torch.Tensor:
        """Return the buffer row of each entry, row by row and head by head, given each entry's `segment`.

        Entry i in this order follows the room of all segments before its own."""
        return torch.arange(len(segment), device=segment.device).add_(segment, alpha=self.room)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._write()
        if keys.shape[2] == 1 and runs_triton(keys.device):
            self.reserve(1)
            self._new = keys.detach(), values.detach()
        else:
            ends, first = self.claim(keys.shape[2])
            self._put(keys, values, ends + first)

    def _write(self) -> None:
        """Write the latest token, unless `decode` has done so."""
        if self._new is not None:
            new, self._new = self._new, None
            self._put(*new, self._ends() + self.behind - 1)

    def _put(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Write states (batch, kv_heads, new, head_dim), those of each segment from its row of `rows` on."""
        if keys.shape[2] > 1:
            rows = (rows[:, None] + torch.arange(keys.shape[2], device=rows.device)).flatten()
        put((self.keys, self.values), (keys, values), rows)

    def claim(self, new: int) -> tuple[torch.Tensor, int]:
        """As in `DenseStorage`."""
        self.reserve(new)
        return self._ends(), self.behind - new

    def reserve(self, new: int) -> None:
        """As in `DenseStorage`."""
        if new > self.room:
            self._place(self.sizes, *self._packed(), spare(self.length) + new)
        self.behind += new
        self.appended += new
        self.length += new
        self.room -= new

    def _ends(self) -> torch.Tensor:
        """Return the row at which the tokens `behind` begin in each segment: LongTensor (batch * kv_heads,)."""
        return (self.starts + self.lengths).flatten()

    def _packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the segment, key and value of each entry in use: (entries in use,), and twice (entries in use,
        head_dim)."""
        self._write()
        total = len(self.indices) + self.appended * self.starts.numel()
        segment = torch.repeat_interleave(self.sizes.flatten(), output_size=total)
        rows = self._packed_rows(segment)
        return segment, self.keys[rows], self.values[rows]

    def state(self) -> dict[str, object]:
        _, keys, values = self._packed()  # writes the latest token
        state = {**super().state(), "_flat": self.flat, "keys": keys, "values": values}
        return {**state, "lengths": self.sizes, "behind": 0, "_new": None}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "RaggedStorage":
        made = super().of_state(state, device)
        segment = torch.repeat_interleave(made.sizes.flatten(), output_size=len(made.keys))
        made._place(made.sizes, segment, made.keys, made.values, made.room)
        return made

    def _rows(self) -> torch.Tensor:
        """Return the buffer row of each slot, (batch, kv_heads, length); it is less than `starts` for unused slots."""
        slots = torch.arange(self.behind - self.length, self.behind, device=self.keys.device)
        return (self.starts + self.lengths)[..., None] + slots

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._write()
        rows = self._rows().maximum(self.starts[..., None])  # an unused slot shows the segment's first entry
        rows.clamp_(max=len(self.keys) - 1)  # an empty segment without room may begin behind the buffer's end
        return self.keys[rows], self.values[rows]

    def segments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """As in `DenseStorage`; lengths without the tokens `behind`."""
        return self.keys, self.values, self.starts, self.lengths, self.length

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """As `Storage.decode`; also writes a token that was just appended."""
        new, self._new = self._new, None
        return ragged_decode(query, *self.segments(), self._sizes, scaling, new, self.behind)

    def _sizes(self) -> list[int]:
        return [rows for length in self.flat for rows in (length + self.appended, self.room)]

    def visible(self) -> torch.Tensor:
        return self._rows() >= self.starts[..., None]

    def kept(self, seen: int) -> Kept:
        if not runs_triton(self.keys.device):
            return super().kept(seen)
        from ...kernels.ragged_layout_triton import from_segments

        self._write()
        ragged = self.keys, self.values, self.indices, self.starts, self.lengths
        return Kept(*from_segments(*ragged, self.behind, self.appended, self.room, seen, self.length))

    def columns(self, seen: int) -> torch.Tensor:
        return with_appended(self._kept_columns(), self.appended, seen)

    def _kept_columns(self) -> torch.Tensor:
        """Return the columns of the slots without appended tokens: LongTensor (batch, kv_heads, entries)."""
        counts = self.counts
        if not len(self.indices):
            return counts.new_full((*counts.shape, self.entries), -1)
        ends = counts.flatten().cumsum(0).view_as(counts)  # in `indices`
        slot = torch.arange(-self.entries, 0, device=ends.device)
        columns = self.indices[(ends[..., None] + slot).clamp_(min=0)].long()
        return columns.masked_fill_(slot < -counts[..., None], -1)

    def select(self, rows: torch.Tensor) -> None:
        self._write()
        buffer_rows, used = self._rows()[rows], self.visible()[rows]
        kept = self._kept_columns()[rows]
        sizes = self.sizes[rows]
        self._flat = Arriving(sizes - self.appended)
        self.indices = kept[kept >= 0].to(torch.int32)
        packed = buffer_rows[used]
        segment = torch.repeat_interleave(sizes.flatten(), output_size=len(packed))
        self._place(sizes, segment, self.keys[packed], self.values[packed], self.room)

    @property
    def room_nbytes(self) -> int:
        spare_rows = self.room * self.starts.numel()
        return self.keys[:spare_rows].nbytes + self.values[:spare_rows].nbytes
