"""Storage of keys with fewer channels (ThinK). https://arxiv.org/abs/2407.21018"""

import math

import torch

from ...scoring.layer_view import all_slots
from ...scoring.windows import pad_columns
from .base import Storage
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

    def __init__(self, keys, values, indices, pads, channels: torch.Tensor, recent: int, room: int | None, totals):
        self.head_dim, self.channels = keys.shape[3], channels.to(torch.int16)
        self._has_all_columns = indices is None
        first = max(keys.shape[2] - recent, 0)
        is_full = indices is not None and totals == all_slots(indices)

        def part(keys: torch.Tensor, some: slice, room: int | None) -> Storage:
            places, empty = (None if each is None else each[..., some] for each in (indices, pads))
            return store(keys, values[:, :, some], places, empty, room, all_slots(places) if is_full else None)

        thin = keys[:, :, :first].gather(3, channels[:, :, None].expand(-1, -1, first, -1))
        self.thin = part(thin, slice(first), 0)
        self.whole = part(keys[:, :, first:], slice(first, None), room)

    @property
    def length(self) -> int:
        return self.thin.length + self.whole.length

    @property
    def appended(self) -> int:
        return self.whole.appended

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.whole.append(keys, values)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        thin, values = self.thin.read()
        recent_keys, recent_values = self.whole.read()
        channels = self.channels.long()[:, :, None].expand(thin.shape)
        keys = thin.new_zeros(*thin.shape[:3], self.head_dim).scatter_(3, channels, thin)
        return torch.cat([keys, recent_keys], 2), torch.cat([values, recent_values], 2)

    def visible(self) -> torch.Tensor | None:
        found = [part.visible() for part in (self.thin, self.whole)]
        if found[0] is None and found[1] is None:
            return None
        batch, kv_heads = self.channels.shape[:2]
        every = torch.ones(batch, kv_heads, self.length, dtype=torch.bool, device=self.channels.device)
        for mask, slots in zip(found, every.split([self.thin.length, self.whole.length], 2), strict=True):
            if mask is not None:
                slots &= mask
        return every

    def columns(self, seen: int) -> torch.Tensor:
        recent = self.whole.columns(seen)
        if self._has_all_columns:
            recent = torch.where(recent < 0, -1, recent + self.thin.length)
        return torch.cat([self.thin.columns(seen), recent], 2)

    def select(self, rows: torch.Tensor) -> None:
        self.channels = self.channels[rows]
        for part in (self.thin, self.whole):
            part.select(rows)
