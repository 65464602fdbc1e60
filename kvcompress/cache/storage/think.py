"""Storage of keys with fewer channels (ThinK). https://arxiv.org/abs/2407.21018"""

import math

import torch

from ...device import runs_triton
from ...scoring.layer_view import all_slots
from ...scoring.windows import pad_columns
from .base import Storage, put
from .dense import DenseStorage
from .ragged import RaggedStorage
from .store import store

WINDOW = 32  # number of the prompt's last queries, by which channels are chosen


def query_power(queries: torch.Tensor, kv_heads: int, padding: torch.Tensor | None) -> torch.Tensor:
    """Return the magnitude of a prompt's last queries in each channel: (batch, kv_heads, head_dim) in fp32.

    It is the sum of squares over the window and the query heads of a KV head. `queries` are (batch, heads, queries,
    head_dim), rotated; `padding` is as in `LayerView`."""
    squares = queries[:, :, -WINDOW:].float().square()
    if padding is not None:
        pads = pad_columns(padding.to(queries.device), queries.shape[2])[:, :, -WINDOW:]
        squares = squares.masked_fill(pads[..., None], 0.0)
    return squares.sum(2).unflatten(1, (kv_heads, -1)).sum(2)


def kept_channels(power: torch.Tensor, keys: torch.Tensor, unused: torch.Tensor | None, part: float) -> torch.Tensor:
    """Return the channels in which queries and kept keys together are largest: LongTensor (batch, kv_heads, channels),
    ascending.

    The fraction `part` of the channels is kept, rounded up. `keys` are (batch, kv_heads, entries, head_dim); `unused`
    is bool (batch, 1 or kv_heads, entries), or None if there are no unused slots."""
    squares = keys.float().square()
    if unused is not None:
        squares = squares.masked_fill(unused[..., None], 0.0)
    count = math.ceil(round(part * keys.shape[3], 6))  # 0.07 * 100 is slightly more than 7
    return (power * squares.sum(2)).topk(count).indices.sort().values


class ThinKStorage(Storage):
    """Two dense or ragged storages: recent and decoded entries with all channels, and older ones whose keys have
    `channels` only.

    The channels stay the same for the life of the cache: an entry that is stored again loses no others.

    Args:
        channels: as returned by `kept_channels`.
        recent: entries of each head that keep all channels.
        Others: as in `store`.
    """

    _new: tuple[torch.Tensor, torch.Tensor] | None = None  # a token that has not been written yet

    def __init__(self, keys, values, indices, pads, channels: torch.Tensor, recent: int, room: int | None, totals):
        self.head_dim, self.channels = keys.shape[3], channels.to(torch.int16)
        self._has_all_columns = indices is None
        self._recent, self._room = recent, room
        self._undivided: RaggedStorage | None = None
        is_full = indices is not None and totals == all_slots(indices)
        if indices is not None and not is_full and totals is not None and keys.device.type == "cuda":
            # How many entries of each head are recent is on its way to the host, which divides them before a step.
            # Until then keys have all channels.
            self._undivided = store(keys, values, indices, pads, 0, totals)
        else:
            self._divide(keys, values, indices, pads, is_full)

    def _divide(self, keys, values, indices, pads, is_full: bool, counts: list[int] | None = None) -> None:
        """Store both parts; `counts` are the entries of each head, if known."""
        (rows, heads, slots, _), first = keys.shape, max(keys.shape[2] - self._recent, 0)

        def part(keys: torch.Tensor, some: slice, room: int | None, held: list[int] | None) -> Storage:
            places, empty = (None if each is None else each[..., some] for each in (indices, pads))
            totals = None if held is None else [sum(held[row * heads :][:heads]) for row in range(rows)]
            return store(keys, values[:, :, some], places, empty, room, all_slots(places) if is_full else totals)

        thin = keys[:, :, :first].gather(3, self.channels.long()[:, :, None].expand(-1, -1, first, -1))
        older = newer = None
        if counts is not None:
            newer = [min(count, slots - first) for count in counts]
            older = [count - recent for count, recent in zip(counts, newer, strict=True)]
        self._thin = part(thin, slice(first), 0, older)
        self._whole = part(keys[:, :, first:], slice(first, None), self._room, newer)

    def _parts(self) -> tuple[DenseStorage | RaggedStorage, DenseStorage | RaggedStorage]:
        """Return both parts, of which the latest token may not be written yet."""
        if (undivided := self._undivided) is not None:
            kept, counts = undivided.kept(0), undivided.flat
            used = slice(undivided.length - max(counts), None)  # there may be more slots than any head uses
            keys, values, indices = (part[:, :, used] for part in (kept.keys, kept.values, kept.indices))
            self._divide(keys, values, indices, None, False, counts)
            self._undivided = None
        return self._thin, self._whole

    def divided(self) -> tuple[DenseStorage | RaggedStorage, DenseStorage | RaggedStorage]:
        """Return the entries with fewer channels and those with all."""
        thin, whole = self._parts()
        if self._new is not None:
            new, self._new = self._new, None
            *buffers, starts, lengths, _ = whole.segments()
            put(buffers, new, (starts + lengths).flatten() + (whole.behind - 1))
        return thin, whole

    @property
    def length(self) -> int:
        return sum(part.length for part in self._parts())

    @property
    def appended(self) -> int:
        return self._parts()[1].appended

    @property
    def decodes_in_place(self) -> bool:
        """On CUDA: a query takes the channels that the keys have."""
        is_possible = runs_triton(self.channels.device)
        return is_possible and all(part.decodes_in_place or part.fills_all_slots for part in self._parts())

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        _, whole = self.divided()
        if keys.shape[2] == 1 and self.decodes_in_place:
            whole.reserve(1)
            self._new = keys.detach(), values.detach()
        else:
            whole.append(keys, values)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """As `Storage.decode`; also writes a token that was just appended."""
        from ...kernels.ragged_decode_triton import few_channels_decode_triton, ragged_decode_triton

        (thin, whole), (new, self._new) = self._parts(), (self._new, None)
        if not thin.length:
            return ragged_decode_triton(query, *whole.segments(), scaling, new=new, appended=whole.behind)
        few, all_ = ((*part.segments(), part.behind) for part in (thin, whole))
        return few_channels_decode_triton(query, few, self.channels, all_, scaling, new)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        (thin, values), (recent_keys, recent_values) = (part.read() for part in self.divided())
        channels = self.channels.long()[:, :, None].expand(thin.shape)
        keys = thin.new_zeros(*thin.shape[:3], self.head_dim).scatter_(3, channels, thin)
        return torch.cat([keys, recent_keys], 2), torch.cat([values, recent_values], 2)

    def visible(self) -> torch.Tensor | None:
        parts = self._parts()
        found = [part.visible() for part in parts]
        if found[0] is None and found[1] is None:
            return None
        batch, kv_heads = self.channels.shape[:2]
        every = torch.ones(batch, kv_heads, self.length, dtype=torch.bool, device=self.channels.device)
        for mask, slots in zip(found, every.split([part.length for part in parts], 2), strict=True):
            if mask is not None:
                slots &= mask
        return every

    def columns(self, seen: int) -> torch.Tensor:
        thin, whole = self._parts()
        recent = whole.columns(seen)
        if self._has_all_columns:
            recent = torch.where(recent < 0, -1, recent + thin.length)
        return torch.cat([thin.columns(seen), recent], 2)

    def select(self, rows: torch.Tensor) -> None:
        for part in self.divided():
            part.select(rows)
        self.channels = self.channels[rows]

    def fork(self) -> "ThinKStorage":
        self.divided()  # once for both
        return super().fork()

    def tensors(self) -> list[torch.Tensor]:
        self.divided()
        return super().tensors()

    @property
    def room_nbytes(self) -> int:
        return self._parts()[1].room_nbytes

    def state(self) -> dict[str, object]:
        self.divided()
        return super().state()
