"""Layers with sliding windows in a `SlotCache`; they are not compressed."""

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..cache.layer import on_their_way
from .layer import DecodingLayer, Slots


class SlidingSlotLayer(DecodingLayer):
    """A layer with sliding windows: each slot is a ring buffer with the window's length."""

    def __init__(self, like: DynamicSlidingWindowLayer, layer_idx: int, slots: Slots):
        self.keys = self.values = None
        self.layer_idx, self.window, self._slots = layer_idx, like.sliding_window, slots
        self._row_nbytes = like.keys[:, :, :1].nbytes + like.values[:, :, :1].nbytes
        self.counts: torch.Tensor | None = None  # by slot, tokens so far
        self._placed: dict[int, int] = {}  # by slot in use, tokens minus the steps at that time

    is_sliding = True

    def rows_for(self, layer: DynamicSlidingWindowLayer, room: int) -> int:
        return self.window

    def nbytes_for(self, rows: int) -> int:
        return rows * self._row_nbytes

    def fill(self, slot: int, layer: DynamicSlidingWindowLayer, rows: int, room: int) -> None:
        if self.counts is None:
            _, heads, _, head_dim = layer.keys.shape
            slots = len(self._slots.seen)
            self.keys = layer.keys.new_zeros(slots, heads, self.window, head_dim)
            self.values = layer.values.new_zeros(slots, heads, self.window, layer.values.shape[3])
            self.counts = torch.zeros(slots, dtype=torch.long, device=layer.keys.device)
        seen, held = layer.cumulative_length, layer.keys.shape[2]
        places = torch.arange(seen - held, seen, device=self.keys.device) % self.window
        self.keys[slot, :, places], self.values[slot, :, places] = layer.keys[0], layer.values[0]
        self.counts[slot], self._placed[slot] = seen, seen - self._slots.steps

    def free(self, slot: int) -> None:
        self.counts[slot] = 0
        del self._placed[slot]

    def resize(self, slots: int, rows: int, moves: dict[int, int]) -> None:
        if not moves:
            self.counts = None
            return
        for name in ("keys", "values", "counts"):
            before = getattr(self, name)
            after = before.new_zeros(slots, *before.shape[1:])
            after[list(moves.values())] = before[list(moves)]
            setattr(self, name, after)
        self._placed = {new: self._placed[old] for old, new in moves.items()}

    @property
    def nbytes(self) -> int:
        return 0 if self.counts is None else self.keys.nbytes + self.values.nbytes

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        with torch.no_grad():
            places = (self.counts % self.window)[:, None, None, None].expand_as(key_states)
            self.keys.scatter_(2, places, key_states)
            self.values.scatter_(2, places[..., :1].expand_as(value_states), value_states)
            self.counts.add_(self._slots.active.to(self.counts.device))
        return on_their_way(self.keys, self), self.values

    def mask(self, query_length: int) -> torch.Tensor:
        places = torch.arange(self.window, device=self.counts.device)
        return (places < self.counts.clamp(min=1)[:, None])[:, None, None]

    def after_attention(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module) -> None:
        """Do nothing: no entries are chosen."""

    def take_back(self) -> None:
        for slot, placed in self._placed.items():
            self.counts[slot] = placed + self._slots.steps
