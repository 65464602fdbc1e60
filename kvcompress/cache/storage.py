"""How a layer's kept entries are stored: `DenseStorage` where every row and KV head keeps as many, `RaggedStorage`
where they differ, `StaticStorage` where decoding is to run as one compiled graph, `QuantizedStorage` in few bits.
All have room for the tokens to come, so that a decoded token is written in place."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..errors import KVCompressError
from ..kernels.quantization import Quantized, Quantizer
from ..kernels.ragged_decode import ragged_decode
from ..policy.options import Engine
from ..scoring.layer_view import Kept

LEAST_ROOM = 32


class Storage(ABC):
    """Entries of one layer. Seen from outside, all is aligned to the right: the newest entry of every row and KV
    head is in the last slot, and a row or head that keeps fewer begins with unused slots."""

    length: int  # slots, of the row and head that keeps most
    appended: int | torch.Tensor  # decoded tokens among them; with fixed shapes on the device
    is_whole: bool = False  # nothing was ever dropped (column = slot), and a prompt can be put behind it in one piece
    is_final: bool = False  # an entry is stored once and for all: another prompt goes behind it by `extend`
    has_fixed_shapes: bool = False  # a decode step is the same graph each time
    decodes_in_place: bool = False  # has `decode`, which attends to the entries where they lie

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
    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: LongTensor (rows,)."""

    def prefetch(self) -> None:  # noqa: B027, most storages have nothing to do
        """The entries will soon be read."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """All buffers, for counting bytes."""

    @property
    @abstractmethod
    def room_nbytes(self) -> int:
        """Bytes of the buffers that wait for tokens to come."""

    def extend(self, kept: Kept, first: int) -> None:
        """Put another compressed prompt, whose columns begin at `first`, behind what is stored (`is_final`)."""
        raise TypeError(f"a {type(self).__name__} is not extended but made anew")

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of one token's queries (batch, heads, 1, head_dim), which stand behind all that is stored, without
        gathering (`decodes_in_place`); the result has the same shape."""
        raise TypeError(f"the entries of a {type(self).__name__} are read, not attended to where they lie")

    def kept(self, seen: int) -> Kept:
        """Everything as one dense, right-aligned piece."""
        return Kept(*self.read(), self.columns(seen))

    def fork(self) -> "Storage":
        """A storage that shares the present entries and may be appended to; undone by dropping it."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


def new_storage(
    engine: Engine,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    pads: torch.Tensor | None,
    room: int | None,
    uniform: bool,
) -> Storage:
    """The storage that `cache_implementation` names, with room for `room` tokens (None: an eighth more). `indices` is
    None for a cache that keeps everything, which may hold `pads`; other arguments as in `DenseStorage` and `store`."""
    kind, device = engine.cache_implementation, keys.device
    if kind.startswith("offloaded"):
        keys, values, indices, pads = (None if t is None else t.cpu() for t in (keys, values, indices, pads))
    if kind in ("static", "offloaded_static"):
        storage = StaticStorage(keys, values, indices, pads, room)
    elif kind == "quantized":
        storage = QuantizedStorage(keys, values, indices, pads, engine.quantizer, engine.kv_residual)
    elif indices is None:
        storage = DenseStorage(keys, values, None, pads, room)
    else:
        storage = store(Kept(keys, values, indices), room, uniform)
    return OffloadedStorage(storage, device) if kind.startswith("offloaded") else storage


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
        return self.indices is None

    @property
    def appended(self) -> int:
        return self.length - self.entries

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

    def select(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.indices = None if self.indices is None else self.indices[rows]
        self.pads = None if self.pads is None else self.pads[rows]

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.keys, self.values, self.indices, self.pads) if t is not None]

    @property
    def room_nbytes(self) -> int:
        return self.keys[:, :, self.length :].nbytes + self.values[:, :, self.length :].nbytes


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
        self.keys = _lasting(keys.new_zeros, (capacity, keys.shape[1])).index_copy_(0, rows, keys)
        self.values = _lasting(values.new_zeros, (capacity, values.shape[1])).index_copy_(0, rows, values)

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


@dataclass(frozen=True)
class _Block:
    """Quantized entries of all rows: `rows` has a pair per row, keys as (head_dim, entries of all heads) and values as
    (entries of all heads, head_dim). `unused`: bool (batch, kv_heads, slots), or None where all slots are in use."""

    rows: list[tuple[Quantized, Quantized]]
    unused: torch.Tensor | None
    heads: int
    slots: int

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (batch, kv_heads, slots, head_dim), zero at unused slots."""
        keys = [self._filled(row, keys.dequantize().T) for row, (keys, _) in enumerate(self.rows)]
        values = [self._filled(row, values.dequantize()) for row, (_, values) in enumerate(self.rows)]
        return torch.stack(keys), torch.stack(values)

    def _filled(self, row: int, packed: torch.Tensor) -> torch.Tensor:
        if self.unused is not None:
            filled = packed.new_zeros(self.heads * self.slots, packed.shape[1])
            filled[~self.unused[row].flatten()] = packed
            packed = filled
        return packed.unflatten(0, (self.heads, self.slots))

    def select(self, rows: torch.Tensor) -> "_Block":
        unused = None if self.unused is None else self.unused[rows]
        return replace(self, rows=[self.rows[row] for row in rows.tolist()], unused=unused)

    def tensors(self) -> list[torch.Tensor]:
        packed = [tensor for pair in self.rows for part in pair for tensor in part.tensors]
        return packed if self.unused is None else [*packed, self.unused]


class QuantizedStorage(Storage):
    """Low-bit entries: what is kept is quantized once; appended tokens wait in full precision until `residual` of
    them are there, and are then quantized once, as a block of their own.

    Keys are grouped per channel, along the tokens, and values per token, as their outliers lie (KIVI,
    https://arxiv.org/abs/2402.02750, section 3). Each row of the batch is a piece of its own, so that rows can be
    selected without unpacking; rows and heads may differ in length.

    Args:
        kept: right-aligned, with -1 in unused slots; its indices may be None for column = slot.
        pads: as in `DenseStorage`.
    """

    is_final = True

    def __init__(self, keys, values, indices, pads, quantizer: Quantizer, residual: int):
        self.quantizer, self.residual = quantizer, residual
        self.indices, self.unused = None, None
        self.entries = self.length = 0
        self.blocks: list[_Block] = []
        self.recent = DenseStorage(keys[:, :, :0], values[:, :, :0], None, None, residual)
        if indices is not None:
            self.extend(Kept(keys, values, indices), first=0)
            return
        self.unused = None if pads is None else pads[:, None].expand(keys.shape[:3])
        self.blocks.append(self._pack(keys, values, self.unused))
        self.entries = self.length = keys.shape[2]

    @property
    def appended(self) -> int:
        return self.length - self.entries

    def extend(self, kept: Kept, first: int) -> None:
        indices = torch.cat([self.columns(first), kept.indices], dim=2)
        unused = kept.indices < 0 if bool((kept.indices < 0).any()) else None
        self._flush()
        self.blocks.append(self._pack(kept.keys, kept.values, unused))
        self.indices, self.unused = indices.to(torch.int32), None
        if bool((indices < 0).any()):
            self.unused = indices < 0
        self.entries = self.length = indices.shape[2]

    def _flush(self) -> None:
        """Quantize the tokens that wait."""
        if self.recent.length:
            keys, values = self.recent.read()
            self.blocks.append(self._pack(keys, values, None))
            self.recent = DenseStorage(keys[:, :, :0], values[:, :, :0], None, None, self.residual)

    def _pack(self, keys: torch.Tensor, values: torch.Tensor, unused: torch.Tensor | None) -> "_Block":
        rows = []
        for row in range(keys.shape[0]):
            used = slice(None) if unused is None else ~unused[row].flatten()
            row_keys, row_values = keys[row].flatten(0, 1)[used], values[row].flatten(0, 1)[used]
            rows.append((self.quantizer.quantize(row_keys.T), self.quantizer.quantize(row_values)))
        return _Block(rows, unused, keys.shape[1], keys.shape[2])

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.recent.append(keys, values)
        self.length += keys.shape[2]
        if self.recent.length >= self.residual:
            self._flush()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [*(block.unpack() for block in self.blocks), self.recent.read()]
        return torch.cat([keys for keys, _ in parts], dim=2), torch.cat([values for _, values in parts], dim=2)

    def visible(self) -> torch.Tensor | None:
        if self.unused is None:
            return None
        appended = self.unused.new_zeros(*self.unused.shape[:2], self.length - self.entries)
        return ~torch.cat([self.unused, appended], dim=2)

    def columns(self, seen: int) -> torch.Tensor:
        shape, device = self.recent.keys.shape[:2], self.recent.keys.device
        if self.indices is None:
            columns = torch.arange(self.length, device=device).expand(*shape, -1)
        else:
            appended = torch.arange(seen - (self.length - self.entries), seen, device=device)
            columns = torch.cat([self.indices.long(), appended.expand(*shape, -1)], dim=2)
        return columns if self.unused is None else columns.masked_fill(~self.visible(), -1)

    def fork(self) -> "QuantizedStorage":
        twin = super().fork()
        twin.blocks, twin.recent = list(self.blocks), self.recent.fork()
        return twin

    def select(self, rows: torch.Tensor) -> None:
        self.blocks = [block.select(rows) for block in self.blocks]
        self.indices = None if self.indices is None else self.indices[rows]
        self.unused = None if self.unused is None else self.unused[rows]
        self.recent.select(rows)

    def tensors(self) -> list[torch.Tensor]:
        own = [tensor for tensor in (self.indices, self.unused) if tensor is not None]
        return [*(tensor for block in self.blocks for tensor in block.tensors()), *own, *self.recent.tensors()]

    @property
    def room_nbytes(self) -> int:
        return self.recent.room_nbytes


class StaticStorage(Storage):
    """Buffers of a fixed shape (batch, kv_heads, capacity, head_dim) and a cursor on the device, so that every decode
    step is the same graph. Rows and heads that keep fewer are padded: static shapes cost their padding.

    Args:
        kept: right-aligned, with -1 in unused slots; None in place of its indices for column = slot.
        pads: as in `DenseStorage`.
        room: tokens that can be appended.
    """

    has_fixed_shapes = True

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
        self.cursor = _lasting(self.slots.new_full, (1,), self.entries)
        self._left = room  # the same on the host, as far as no compiled graph has written
        self._mark()

    def _mark(self) -> None:
        """The graph writes into these tensors: CUDA graphs are given up where it may not count on their place. Without
        a guard, other tensors (the next prompt's) are recorded anew and not compiled anew."""
        for tensor in (self.keys, self.values, self.cursor):
            torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def length(self) -> int:
        return self.capacity

    @property
    def is_whole(self) -> bool:
        return self.indices is None

    @property
    def appended(self) -> torch.Tensor:
        """LongTensor (1,)."""
        return self.cursor - self.entries

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            if keys.shape[2] > self._left:
                raise KVCompressError(
                    f"the static cache is full: it has room for max_new_tokens={self.capacity - self.entries} tokens "
                    "behind a prompt"
                )
            self._left -= keys.shape[2]
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

    def select(self, rows: torch.Tensor) -> None:
        for name in ("keys", "values", "usable"):
            setattr(self, name, getattr(self, name)[rows])
        self.indices = None if self.indices is None else self.indices[rows]
        self._mark()

    def fork(self) -> "StaticStorage":
        twin = super().fork()
        twin.cursor = _lasting(self.cursor.clone)
        twin._mark()
        return twin

    def tensors(self) -> list[torch.Tensor]:
        tensors = (self.keys, self.values, self.indices, self.usable, self.slots, self.cursor)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def room_nbytes(self) -> int:
        end = int(self.cursor)
        return self.keys[:, :, end:].nbytes + self.values[:, :, end:].nbytes


class OffloadedStorage(Storage):
    """Another storage in the CPU's memory: its entries come to the device for the one layer that attends, and the next
    layer's are on their way meanwhile.

    Args:
        inner: a storage on the CPU.
        device: where the model computes.
    """

    def __init__(self, inner: Storage, device: torch.device):
        self.inner, self.device = inner, device
        self.fetched: tuple[torch.Tensor, ...] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def is_whole(self) -> bool:
        return self.inner.is_whole

    @property
    def appended(self) -> int:
        return int(self.inner.appended)

    def prefetch(self) -> None:
        """Start bringing the entries to the device, beside what it is computing."""
        if self.stream is not None and self.fetched is None:
            with torch.cuda.stream(self.stream):
                self.fetched = tuple(part.pin_memory().to(self.device, non_blocking=True) for part in self.inner.read())

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.inner.append(keys.cpu(), values.cpu())
        if self.fetched is None:
            return
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        new = (keys, values)
        self.fetched = tuple(torch.cat([old, part], dim=2) for old, part in zip(self.fetched, new, strict=True))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        fetched, self.fetched = self.fetched, None  # the device holds one layer's entries at a time
        if fetched is None:
            return tuple(part.to(self.device) for part in self.inner.read())
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return fetched

    def visible(self) -> torch.Tensor | None:
        visible = self.inner.visible()
        return None if visible is None else visible.to(self.device)

    def columns(self, seen: int) -> torch.Tensor:
        return self.inner.columns(seen).to(self.device)

    def fork(self) -> "OffloadedStorage":
        twin = super().fork()
        twin.inner, twin.fetched = self.inner.fork(), None
        return twin

    def select(self, rows: torch.Tensor) -> None:
        self.inner.select(rows.cpu())
        self.fetched = None

    def tensors(self) -> list[torch.Tensor]:
        return self.inner.tensors()

    @property
    def room_nbytes(self) -> int:
        return self.inner.room_nbytes


def _roomy(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of (batch, kv_heads, entries, head_dim) at the front of a buffer for `capacity` entries."""
    buffer = _lasting(states.new_empty, (*states.shape[:2], capacity, states.shape[3]))
    buffer[:, :, : states.shape[2]] = states
    return buffer


def _lasting(make: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """`make(*args)`, which can be written in place also outside of a `torch.inference_mode` in which it is made."""
    with torch.inference_mode(False), torch.no_grad():
        return make(*args)
