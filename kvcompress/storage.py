"""How a layer's kept entries are stored: `DenseStorage` where every row and KV head keeps as many, `RaggedStorage`
where they differ, `StaticStorage` where decoding is to run as one compiled graph. All have room for the tokens to
come, so that a decoded token is written in place."""

from abc import ABC, abstractmethod

import torch

from .clusters.base import Kept

LEAST_ROOM = 32


class Storage(ABC):
    """Entries of one layer. Seen from outside, all is aligned to the right: the newest entry of every row and KV
    head is in the last slot, and a row or head that keeps fewer begins with unused slots."""

    length: int  # slots, of the row and head that keeps most

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write decoded states (batch, kv_heads, new, head_dim) behind the stored ones of every row and head."""

    @abstractmethod
    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (batch, kv_heads, length, head_dim)."""

    @abstractmethod
    def visible(self) -> torch.Tensor | None:
        """bool (batch, 1 or kv_heads, length), False at unused slots; None where there are none."""

    @abstractmethod
    def columns(self, seen: int) -> torch.Tensor:
        """The column that each slot holds: LongTensor (batch, kv_heads, length), -1 where unused. Appended tokens
        have the columns that end with `seen`."""

    @abstractmethod
    def drop_last(self, tokens: int) -> None:
        """Take back the last appended tokens."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """All buffers, for counting bytes."""

    def kept(self, seen: int) -> Kept:
        """Everything as one dense, right-aligned piece."""
        return Kept(*self.read(), self.columns(seen))

    def fork(self) -> "Storage":
        """A storage that shares the present entries and may be appended to; undone by dropping it."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


def store(kept: Kept, room: int | None, uniform: bool) -> Storage:
    """Store what was kept, with room for `room` tokens. `uniform`: the caller knows that no slot is unused;
    otherwise the lengths are counted, which synchronises with the device."""
    if uniform:
        return DenseStorage(kept.keys, kept.values, kept.indices, None, room)
    counts = (kept.indices >= 0).sum(-1)
    lengths = counts.tolist()
    flat = [length for row in lengths for length in row]
    if min(flat) == max(flat):
        unused = kept.indices.shape[2] - flat[0]
        return DenseStorage(*(part[:, :, unused:] for part in (kept.keys, kept.values, kept.indices)), None, room)
    return RaggedStorage(kept, counts, flat, room)


def spare(length: int) -> int:
    """Room without a known answer length: an eighth more, so that a token costs a constant number of copies."""
    return max(LEAST_ROOM, length // 8)


class DenseStorage(Storage):
    """One buffer (batch, kv_heads, capacity, head_dim) for keys and one for values.

    Args:
        keys, values: (batch, kv_heads, entries, head_dim).
        indices: LongTensor (batch, kv_heads, entries), or None for column = slot.
        pads: bool (batch, entries), True at pads that are stored although nobody may see them, or None. Only a cache
            that keeps everything stores pads, so that all shapes are those of transformers' own cache.
    """

    def __init__(self, keys, values, indices, pads, room: int | None):
        self.entries = self.length = keys.shape[2]
        self.indices = None if indices is None else indices.to(torch.int32)
        self.pads = pads
        capacity = self.entries + (spare(self.entries) if room is None else room)
        self.keys, self.values = _roomy(keys, capacity), _roomy(values, capacity)

    @property
    def is_whole(self) -> bool:
        """True where nothing was ever dropped: column = slot."""
        return self.indices is None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _roomy(self.keys[:, :, : self.length], end + spare(end))
            self.values = _roomy(self.values[:, :, : self.length], end + spare(end))
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def visible(self) -> torch.Tensor | None:
        if self.pads is None:
            return None
        new = self.pads.new_zeros(self.pads.shape[0], self.length - self.pads.shape[1])
        return ~torch.cat([self.pads, new], dim=1)[:, None]

    def columns(self, seen: int) -> torch.Tensor:
        shape = self.keys.shape[:2]
        if self.indices is None:
            columns = torch.arange(self.length, device=self.keys.device).expand(*shape, -1)
        else:
            appended = torch.arange(seen - (self.length - self.entries), seen, device=self.keys.device)
            columns = torch.cat([self.indices.long(), appended.expand(*shape, -1)], dim=2)
        visible = self.visible()
        return columns if visible is None else columns.masked_fill(~visible, -1)

    def drop_last(self, tokens: int) -> None:
        self.length -= tokens

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.indices = None if self.indices is None else self.indices[rows]
        self.pads = None if self.pads is None else self.pads[rows]

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.keys, self.values, self.indices, self.pads) if t is not None]


class RaggedStorage(Storage):
    """One flat buffer (entries, head_dim) for keys and one for values; each row and KV head is a segment of it, with
    spare rows at its end. A decode write is one `index_copy_` of batch * kv_heads rows.

    Args:
        kept: right-aligned, with -1 in unused slots.
        counts: LongTensor (batch, kv_heads), entries in use; `flat` is the same as a list.
    """

    def __init__(self, kept: Kept, counts: torch.Tensor, flat: list[int], room: int | None):
        self.entries = self.length = max(flat)
        self.appended = 0
        self.counts = counts
        used = kept.indices >= 0
        self.indices = kept.indices[used].to(torch.int32)
        self._place(kept.keys[used], kept.values[used], sum(flat), spare(self.entries) if room is None else room)

    def _place(self, keys: torch.Tensor, values: torch.Tensor, total: int, room: int) -> None:
        """Write segments (entries in use, head_dim), row by row and head by head, with `room` behind each."""
        self.room = room
        size = (self.counts + self.appended).flatten()
        ends = (size + room).cumsum(0)
        self.starts = (ends - room - size).view_as(self.counts)
        # Entry i of the packed order lies behind the room of all segments before its own.
        segment = torch.repeat_interleave(size, output_size=total)
        rows = torch.arange(total, device=keys.device) + segment * room
        capacity = total + room * size.numel()
        self.keys = keys.new_empty(capacity, keys.shape[1]).index_copy_(0, rows, keys)
        self.values = values.new_empty(capacity, values.shape[1]).index_copy_(0, rows, values)

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
        self._place(self.keys[rows], self.values[rows], rows.numel(), room)

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots are in use, and the buffer row of each: (batch, kv_heads, length)."""
        size = self.counts + self.appended
        slot = torch.arange(self.length, device=size.device) - (self.length - size)[..., None]
        return slot >= 0, self.starts[..., None] + slot.clamp(min=0)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, rows = self._rows()
        return self.keys[rows], self.values[rows]

    def visible(self) -> torch.Tensor:
        return self._rows()[0]

    def columns(self, seen: int) -> torch.Tensor:
        used, _ = self._rows()
        shape = (*self.counts.shape, self.appended)
        kept = torch.full((*self.counts.shape, self.entries), -1, device=self.keys.device)
        kept[used[..., : self.entries]] = self.indices.long()
        new = torch.arange(seen - self.appended, seen, device=self.keys.device).expand(shape)
        return torch.cat([kept, new], dim=2)

    def drop_last(self, tokens: int) -> None:
        self.appended -= tokens
        self.length -= tokens
        self.room += tokens

    def select(self, rows: torch.Tensor) -> None:
        used, buffer_rows = self._rows()
        used, buffer_rows = used[rows], buffer_rows[rows]
        kept = torch.full((*self.counts.shape, self.entries), -1, device=self.keys.device, dtype=torch.int32)
        kept[self._rows()[0][..., : self.entries]] = self.indices
        self.counts = self.counts[rows]
        self.indices = kept[rows][used[..., : self.entries]]
        packed = buffer_rows[used]
        self._place(self.keys[packed], self.values[packed], packed.numel(), self.room)

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.indices, self.counts, self.starts]


class StaticStorage(Storage):
    """Buffers of a fixed shape (batch, kv_heads, capacity, head_dim) and a cursor on the device, so that every decode
    step is the same graph. Rows and heads that keep fewer are padded: static shapes cost their padding.

    Args:
        kept: right-aligned, with -1 in unused slots; None in place of its indices for column = slot.
        pads: as in `DenseStorage`.
        room: tokens that can be appended.
    """

    def __init__(self, keys, values, indices, pads, room: int):
        self.entries, self.capacity = keys.shape[2], keys.shape[2] + room
        self.indices = None if indices is None else indices.to(torch.int32)
        self.keys, self.values = _roomy(keys, self.capacity), _roomy(values, self.capacity)
        # Attention multiplies by zero what no query may see: it must be finite.
        self.keys[:, :, self.entries :] = 0
        self.values[:, :, self.entries :] = 0
        unused = torch.zeros(keys.shape[0], 1, self.entries, dtype=torch.bool, device=keys.device)
        if indices is not None:
            unused = indices < 0
        elif pads is not None:
            unused = pads[:, None]
        room_used = torch.zeros(*unused.shape[:2], room, dtype=torch.bool, device=keys.device)
        self.usable = ~torch.cat([unused, room_used], dim=2)
        self.slots = torch.arange(self.capacity, device=keys.device)
        self.cursor = torch.full((1,), self.entries, device=keys.device)

    @property
    def length(self) -> int:
        return self.capacity

    @property
    def is_whole(self) -> bool:
        return self.indices is None

    def appended(self) -> torch.Tensor:
        """Tokens appended, on the device: LongTensor (1,)."""
        return self.cursor - self.entries

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self.cursor + self.slots[: keys.shape[2]]
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)
        self.cursor.add_(keys.shape[2])

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def visible(self) -> torch.Tensor:
        return self.usable & (self.slots < self.cursor)

    def columns(self, seen: int) -> torch.Tensor:
        shape = self.keys.shape[:2]
        end = int(self.cursor)
        columns = torch.full((*shape, self.capacity), -1, device=self.keys.device)
        columns[..., : self.entries] = self.slots[: self.entries] if self.indices is None else self.indices.long()
        columns[..., self.entries : end] = torch.arange(seen - (end - self.entries), seen, device=self.keys.device)
        return columns.masked_fill(~self.visible(), -1)

    def drop_last(self, tokens: int) -> None:
        self.cursor -= tokens

    def select(self, rows: torch.Tensor) -> None:
        for name in ("keys", "values", "usable"):
            setattr(self, name, getattr(self, name)[rows])
        self.indices = None if self.indices is None else self.indices[rows]

    def fork(self) -> "StaticStorage":
        twin = super().fork()
        twin.cursor = self.cursor.clone()
        return twin

    def tensors(self) -> list[torch.Tensor]:
        tensors = (self.keys, self.values, self.indices, self.usable, self.slots, self.cursor)
        return [tensor for tensor in tensors if tensor is not None]


def _roomy(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of (batch, kv_heads, entries, head_dim) at the front of a buffer for `capacity` entries."""
    buffer = states.new_empty(*states.shape[:2], capacity, states.shape[3])
    buffer[:, :, : states.shape[2]] = states
    return buffer
