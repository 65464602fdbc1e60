"""The layers of a `SlotCache`: the sequences' entries, a slot for each, and evictions while decoding."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from ..cache.eviction import batch_key, evict_together, note_left
from ..cache.layer import CompressedLayer, wrap_keys
from ..cache.memory import Memory
from ..cache.scope import States
from ..device import Arriving, on_device, own_dtypes
from ..scoring.layer_view import Kept
from ..scoring.rotary import Rotary
from .pool import RaggedSlotPool, SlotPool

SPARE = 16  # further tokens to make room for when a slot has to grow


@dataclass
class Slots:
    """State of the slots that all layers share.

    Attributes:
        seen: LongTensor (slots,), tokens of each sequence so far: the column of the next.
        active: bool (slots,), False if a slot is free.
        cursor: LongTensor (1,), where the layers write the next queries in their ring buffers.
        steps: decode steps so far.
        held: `seen` of each slot in use, on the host.
        rotary: the rotation of the current step's queries, if the method needs it.
        hidden: bool (slots, entries), the entries that the step hides from later layers, for a method that hides.
    """

    seen: torch.Tensor
    active: torch.Tensor
    cursor: torch.Tensor
    steps: int = 0
    held: dict[int, int] = field(default_factory=dict)
    rotary: Rotary | None = None
    hidden: torch.Tensor | None = None


class DecodingLayer(CacheLayerMixin):
    """Interface of a `SlotCache` layer for transformers and our attention function. Each step feeds one token per slot.

    For the attention function it looks like a `CompressedLayer` while decoding."""

    is_sliding = is_first_prompt = is_whole = wants_sums = decodes_in_place = False
    has_fixed_shapes = True  # for the attention function: one query under a mask
    is_initialized = is_compileable = True
    rows = 0  # of each slot, once there are slots that may grow

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: slots are filled before a step."""

    def get_seq_length(self) -> int:
        return 1  # positions are passed with every step; this only says that the cache is not empty

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length + 1, 0

    def after_attention(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module) -> None:
        """Record what later evictions need. Arguments as in `CompressedLayer.after_attention`."""

    def count(self) -> None:
        """Finish a step."""

    def evictions(self) -> list[Callable[[], Callable[[], None]]]:
        """Return a function for each group of sequences that are due. It chooses what the decode budget leaves, and
        returns another, which replaces the entries."""
        return []


class SlotLayer(DecodingLayer):
    """A layer with full attention."""

    def __init__(self, like: CompressedLayer, slots: Slots, is_fixed: bool):
        """`like` is this layer in any filled cache of the policy; `is_fixed` says whether every step has the same
        shapes."""
        self.keys = self.values = None  # transformers' names; the entries are in `storage`
        self.layer_idx, self.policy, self.choice = like.layer_idx, like.policy, like.choice
        self._slots, self._is_fixed, self._hiding = slots, is_fixed, like.hiding
        is_even = is_fixed or self.policy.head_budget == "uniform"
        self._pool_type = SlotPool if is_even else RaggedSlotPool
        self.storage: SlotPool | None = None
        self._memories: dict[int, Memory] = {}  # by slot, without the entries
        self._attended: dict[int, torch.Tensor | None] = {}  # by slot, `Memory.attended` before the current step
        self._latest: torch.Tensor | None = None  # queries (slots, heads, window, head_dim), a ring buffer
        self._scaling, self._module = like.scaling, like.module
        self._features: torch.Tensor | None = None
        kept, latest = like.memory.kept(), like.memory.latest_queries[:1] if self.policy.decode is not None else []
        self._fixed_nbytes = self.policy.query_window * sum(queries[:, :, :1].nbytes for queries in latest)
        self._row_nbytes = kept.keys[:, :1, :1].nbytes + kept.values[:, :1, :1].nbytes
        self._row_nbytes += 4 * self._knows_columns + 4 * (kept.sums is not None)

    # -- slots

    def rows_for(self, layer: CompressedLayer, room: int) -> int:
        """Return the rows of a slot for a prompt's entries in `layer`, with `room` new tokens."""
        counts = (layer.kept_columns()[0] >= 0).sum(-1).tolist()
        if self.policy.decode is not None:
            length, held = layer.seen + room, sum(counts) // len(counts)
            most = max(held, self.choice.decode_budgets([length], layer.memory.log)[0])
            room = min(room, most - held + self.policy.decode_interval)
        return self._pool_type.rows_for(counts, room)

    @property
    def rows(self) -> int:
        return 0 if self.storage is None else self.storage.rows

    def nbytes_for(self, rows: int) -> int:
        """Return the bytes of a slot with this many rows."""
        return self._fixed_nbytes + rows * self._row_nbytes

    @property
    def _knows_columns(self) -> bool:
        return self.policy.decode is not None or self._hiding is not None

    def fill(self, slot: int, layer: CompressedLayer, rows: int) -> None:
        """Move a prompt's entries from `layer`. `rows` is the size of every slot, used for the first prompt."""
        memory = layer.memory
        kept = memory.kept()
        if self.storage is None:
            slots = len(self._slots.seen)
            self.storage = self._pool_type(kept, slots, rows, self._is_fixed, self._knows_columns)
            self.storage.steps = self._slots.steps
        if self.policy.decode is not None:
            self._remember(slot, memory.latest_queries)
        self.storage.place([slot], kept, (kept.indices >= 0).sum(-1).tolist())
        memory.storage, memory.sums, memory.latest_queries, memory.answer_scores = None, None, [], None
        self._memories[slot] = memory

    def free(self, slot: int) -> None:
        self.storage.free(slot)
        del self._memories[slot]

    def resize(self, slots: int, rows: int, moves: dict[int, int]) -> None:
        """Change the number of slots and their rows; the contents of `slot` move to `moves[slot]`."""
        if not moves:
            self.storage = self._latest = None
            return
        self.storage = self.storage.resized(slots, rows, moves)
        self._memories = {new: self._memories[old] for old, new in moves.items()}
        if self._latest is not None:
            before = self._latest
            self._latest = before.new_full((slots, *before.shape[1:]), torch.nan)
            self._latest[list(moves.values())] = before[list(moves)]

    def _remember(self, slot: int, pieces: list[torch.Tensor]) -> None:
        """Write the latest queries of a prompt to the ring buffer, as if decode steps had."""
        if not pieces:
            return
        window = self.policy.query_window
        queries = torch.cat(pieces, dim=2)[0, :, -window:]
        if self._latest is None:
            shape = (len(self._slots.seen), queries.shape[0], window, queries.shape[2])
            self._latest = queries.new_full(shape, torch.nan)
        self._latest[slot] = torch.nan
        self._latest[slot, :, self._order[window - queries.shape[1] :]] = queries

    @property
    def _order(self) -> torch.Tensor:
        """The places of the ring buffer, from the oldest query to the latest."""
        window = self.policy.query_window
        return (torch.arange(window, device=self._latest.device) + self._slots.steps) % window

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._latest, self.storage) if part is not None)

    # -- a decode step

    def set_features(self, features: torch.Tensor) -> None:
        """As `CompressedLayer.set_features`."""
        self._features = features

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Take new states (slots, kv_heads, 1, head_dim); return the keys and values to attend to."""
        slots, device, key_states = self._slots, key_states.device, self.policy.cluster.as_stored(key_states)
        with torch.no_grad():
            self.storage.append(key_states, value_states, slots.seen.to(device), slots.active.to(device))
        keys, values = (key_states, value_states) if self.decodes_in_place else self.storage.read()
        return wrap_keys(keys, self), values

    def mask(self, query_length: int) -> torch.Tensor:
        """Return the entries that the queries see: bool (slots, kv_heads, 1, keys)."""
        visible = self.storage.visible()
        if self._is_hiding:
            visible = visible & ~self._slots.hidden[:, None, : visible.shape[2]].to(visible.device)
        return visible[:, :, None]

    @property
    def _is_hiding(self) -> bool:
        return self._hiding is not None and self.layer_idx >= self._hiding.first_layer

    @property
    def is_compileable(self) -> bool:
        return self._is_fixed and self._hiding is None

    @property
    def decodes_in_place(self) -> bool:
        return self.storage.decodes_in_place and not self._is_hiding

    @torch.no_grad()
    def after_attention(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module) -> None:
        """Record what later evictions need. Arguments as in `CompressedLayer.after_attention`."""
        if self._hiding is not None and self.layer_idx == self._hiding.first_layer - 1:
            self._hide(queries, scaling)
        if self._latest is not None:
            if self.policy.cluster.reads_hidden:
                queries, self._features = self.choice.known_features(self._features), None
            rotary = self._slots.rotary and self._slots.rotary.to(queries.device)  # it is on the first layer's
            latest = self.choice.latest(queries, rotary)
            self._latest.index_copy_(2, self._slots.cursor.to(latest.device), latest.to(self._latest.dtype))

    def _hide(self, queries: torch.Tensor, scaling: float) -> None:
        slots, capacity = self._slots, self.storage.rows // self.storage.heads
        slots.hidden = torch.zeros(len(slots.seen), capacity, dtype=torch.bool, device=queries.device)
        for slot, memory in self._memories.items():
            seen, entries = slots.held[slot] + 1, partial(self.storage.kept, [slot])
            self._attended[slot] = memory.attended
            with own_dtypes(queries.device):
                self._hiding.choose(memory, entries, seen, queries[slot : slot + 1], scaling)
            if self._hiding.hidden is not None:
                slots.hidden[slot, : self._hiding.hidden.shape[1]] = self._hiding.hidden[0]

    def take_back(self) -> None:
        """Undo the current step, if it reached this layer."""
        self.storage.take_back(self._slots.steps)
        for slot, attended in self._attended.items():
            self._memories[slot].attended = attended
        self._attended.clear()

    def count(self) -> None:
        self._attended.clear()
        self.storage.steps = self._slots.steps  # compiled graphs do not count steps
        for memory in self._memories.values():
            memory.decoded += 1

    def evictions(self) -> list[Callable[[], Callable[[], None]]]:
        interval, together = self.policy.decode_interval, defaultdict(list)
        for slot, memory in self._memories.items():
            if memory.decoded >= interval:
                together[memory.decoded, batch_key(memory)].append(slot)
        return [partial(self._evict, slots) for slots in together.values()]

    @torch.no_grad()
    def _evict(self, slots: list[int]) -> Callable[[], None]:
        memories = [self._memories[slot] for slot in slots]
        seen = [self._slots.held[slot] for slot in slots]
        queries = None
        if self._latest is not None:
            queries = self._latest[on_device(slots, self._latest.device)][:, :, self._order]
        before, rotary = self.storage.kept(slots), self._slots.rotary
        if rotary is not None:
            rotary = rotary.rows(on_device(slots, rotary.cos.device)).to(before.keys.device)
        states = States(queries, self._scaling, self._module, rotary)
        left = evict_together(self.choice, memories, seen, before, states, memories[0].decoded)
        counts = left.held or Arriving((left.indices >= 0).sum(-1))
        return partial(self._replace, slots, before, left, counts)

    @torch.no_grad()
    def _replace(self, slots: list[int], before: Kept, left: Kept, counts: list[list[int]] | Arriving) -> None:
        """Replace the contents `before` of these slots by `left`, with `counts` entries in each slot's heads."""
        if isinstance(counts, Arriving):
            flat, heads = counts.tolist(), left.indices.shape[1]
            counts = [flat[first : first + heads] for first in range(0, len(flat), heads)]
        rows = max(self._pool_type.rows_for(of_heads, self.policy.decode_interval) for of_heads in counts)
        if rows > self.storage.rows:  # heads or layers now share their budget differently
            rows += SPARE * self.storage.heads
            self.storage = self.storage.resized(self.storage.slots, rows, {slot: slot for slot in self._memories})
        if left is not before:
            self.storage.place(slots, left, counts)
        memories = [self._memories[slot] for slot in slots]
        note_left(memories, before, left)
        for memory in memories:
            memory.decoded = 0


class SlidingSlotLayer(DecodingLayer):
    """A layer with sliding windows, which is not compressed: each slot is a ring buffer with the window's length."""

    is_sliding = True

    def __init__(self, like: DynamicSlidingWindowLayer, layer_idx: int, slots: Slots):
        self.keys = self.values = None
        self.layer_idx, self.window, self._slots = layer_idx, like.sliding_window, slots
        self._row_nbytes = like.keys[:, :, :1].nbytes + like.values[:, :, :1].nbytes
        self.counts: torch.Tensor | None = None  # by slot, tokens so far
        self._placed: dict[int, int] = {}  # by slot in use, tokens minus the steps at that time

    def rows_for(self, layer: DynamicSlidingWindowLayer, room: int) -> int:
        return self.window

    def nbytes_for(self, rows: int) -> int:
        return rows * self._row_nbytes

    def fill(self, slot: int, layer: DynamicSlidingWindowLayer, rows: int) -> None:
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
            self.keys = self.values = self.counts = None
            return
        for name in ("keys", "values", "counts"):
            before = getattr(self, name)
            after = before.new_zeros(slots, *before.shape[1:])
            after[list(moves.values())] = before[list(moves)]
            setattr(self, name, after)
        self._placed = {new: self._placed[old] for old, new in moves.items()}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.keys, self.values) if part is not None)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        with torch.no_grad():
            places = (self.counts % self.window)[:, None, None, None].expand_as(key_states)
            self.keys.scatter_(2, places, key_states)
            self.values.scatter_(2, places[..., :1].expand_as(value_states), value_states)
            self.counts.add_(self._slots.active.to(self.counts.device))
        return wrap_keys(self.keys, self), self.values

    def mask(self, query_length: int) -> torch.Tensor:
        places = torch.arange(self.window, device=self.counts.device)
        return (places < self.counts.clamp(min=1)[:, None])[:, None, None]

    def take_back(self) -> None:
        for slot, placed in self._placed.items():
            self.counts[slot] = placed + self._slots.steps
