"""Evictions while decoding from several layers at once, so that a GPU launches fewer kernels."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..device import on_device
from ..errors import one_line
from ..scoring.layer_view import SEVERAL, Kept, RowLayer, SeveralLayers
from .choice import Choice
from .eviction import batch_key, evict, evict_together
from .memory import Memory
from .scope import States
from .storage.offloaded import OffloadedStorage

# Bytes that copies and attention weights of the layers evicted from at once may take, by type of device. More would
# hardly spare launches, and elsewhere these cost nothing.
MOST_NBYTES = {"cuda": 64 << 20}


@dataclass(frozen=True)
class Due:
    """An eviction that is due in a layer.

    Attributes:
        states: of the layer's attention.
        own: entries to keep of each row.
        slot_nbytes: bytes of a copy of one slot of all rows and heads, with the attention that it receives.
        token_nbytes: bytes of what a method that compares heads needs for each token so far (scoring/heads.py).
        key: equal for layers that can be evicted from at once.
    """

    choice: Choice
    memory: Memory
    states: States
    own: list[int]
    slot_nbytes: int
    token_nbytes: int
    key: Hashable


class Evictions:
    """The evictions that are due in the layers of one cache.

    On CUDA a layer waits for later ones of the same forward pass, in which nothing reads its entries any more, and they
    are evicted from as the rows of one batch."""

    def __init__(self):
        self._due: list[Due] = []
        self._alone = False  # whether the method needs to know its layer

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_due": []}  # only a pass that broke off leaves any

    def forget(self) -> None:
        """Forget what a pass that broke off has left."""
        self._due = []

    def add(self, choice: Choice, memory: Memory, states: States) -> None:
        """Evict from a layer, now or together with later layers. The last layer does not wait."""
        most = MOST_NBYTES.get(states.queries.device.type, 0)
        due = None if self._alone or not most else due_together(choice, memory, states)
        if due is None or (self._due and due.key != self._due[0].key) or _nbytes([*self._due, due]) > most:
            self._evict()
        if due is None:
            evict(choice, memory, states)
            return
        self._due.append(due)
        if choice.place == choice.num_layers - 1:
            self._evict()

    def _evict(self) -> None:
        due, self._due = self._due, []
        left = None
        if len(due) > 1 and not self._alone:
            try:
                left = left_at_once(due)
            except SeveralLayers:
                self._alone = True
            except (TypeError, RuntimeError) as error:  # torch may refuse the stand-in for a layer, or memory run out
                self._alone = True
                logging.getLogger("kvcompress").warning("evicting layer by layer from now on: %s", one_line(error, 200))
        for place, each in enumerate(due):
            if left is None:
                evict(each.choice, each.memory, each.states)
            else:
                each.memory.reduce_to(*left[place])


def _nbytes(due: list[Due]) -> int:
    first = due[0]
    stored, seen = max(each.memory.stored for each in due), first.memory.seen
    return len(due) * (stored * first.slot_nbytes + seen * first.token_nbytes)


def due_together(choice: Choice, memory: Memory, states: States) -> Due | None:
    """Return an eviction that can be made together with other layers'; None if it has to be made alone."""
    storage, policy = memory.storage, choice.policy
    if isinstance(storage, OffloadedStorage) or policy.moves_keys:
        return None
    held = storage.held()
    if held is None and not memory.has_no_pads:  # the host would have to ask
        return None
    own = choice.decode_budgets(memory.log.lengths_at(memory.seen), memory.log)
    entries = [storage.length] * len(own) if held is None else [max(of_heads) for of_heads in held]
    if any(budget >= some for budget, some in zip(own, entries, strict=True)):  # not all rows evict
        return None
    keys, values, starts, *_ = storage.segments()
    voting = states.queries.shape[1] * sum(some.shape[2] for some in memory.latest_queries)
    slot_nbytes = starts.numel() * (keys[:1].nbytes + values[:1].nbytes) + 4 * len(own) * voting
    key = (
        (starts.shape, keys.shape[1], values.shape[1], keys.dtype, keys.device, voting),
        (states.scaling, memory.seen, memory.decoded, batch_key(memory)),
        getattr(policy.cluster.score, "handles_padding", False) or storage.length,
    )
    token_nbytes = 12 * starts.numel() if policy.cluster.mixes_heads else 0
    return Due(choice, memory, states, own, slot_nbytes, token_nbytes, key)


def left_at_once(due: list[Due]) -> list[tuple[Kept, Kept]]:
    """Return the entries of each layer, and what the decode budget leaves of them. Raises SeveralLayers if the method
    needs to know its layer."""
    first, memories, rows = due[0], [each.memory for each in due], len(due[0].own)
    queries, rotary = None, first.states.rotary
    if first.memory.latest_queries:
        queries = torch.cat([torch.cat(memory.latest_queries, dim=2) for memory in memories])
    if rotary is not None:
        rotary = rotary.rows(on_device([*range(rows)] * len(due), rotary.cos.device))
    before = [replace(memory.kept(), held=memory.storage.held()) for memory in memories]
    stacked = _stacked(before)
    left = evict_together(
        first.choice,
        memories,
        [memory.seen for memory in memories],
        stacked,
        States(queries, first.states.scaling, SEVERAL, rotary),
        first.memory.decoded,
        has_no_pads=stacked.held is None,
        own=[budget for each in due for budget in each.own],
        row_layers=tuple(RowLayer(each.choice.place, each.states.module) for each in due for _ in range(rows)),
    )
    of_layers = [slice(first_row, first_row + rows) for first_row in range(0, len(due) * rows, rows)]
    return [(kept, _of_rows(left, of_layer)) for kept, of_layer in zip(before, of_layers, strict=True)]


def _stacked(layers: list[Kept]) -> Kept:
    """Return the entries of several layers as the rows of one batch, aligned to the right."""
    held = None
    if any(kept.held for kept in layers) or len({kept.indices.shape[2] for kept in layers}) > 1:
        full = ([[kept.indices.shape[2]] * kept.indices.shape[1]] * len(kept.indices) for kept in layers)
        held = [row for kept, every in zip(layers, full, strict=True) for row in kept.held or every]
    sums = None if layers[0].sums is None else _joined([kept.sums for kept in layers])
    keys, values = (_joined([getattr(kept, name) for kept in layers]) for name in ("keys", "values"))
    return Kept(keys, values, _joined([kept.indices for kept in layers], -1), sums, held=held)


def _joined(layers: list[torch.Tensor], unused: int = 0) -> torch.Tensor:
    """Concatenate tensors (batch, kv_heads, slots, ...) as rows, with `unused` in front of those with fewer slots."""
    most = max(part.shape[2] for part in layers)
    missing = [(0, 0) * (part.ndim - 3) + (most - part.shape[2], 0) for part in layers]
    return torch.cat(
        [F.pad(part, n, value=unused) if any(n) else part for part, n in zip(layers, missing, strict=True)]
    )


def _of_rows(left: Kept, rows: slice) -> Kept:
    """Return some rows of what was left, without slots that none of them uses, as far as the host knows. What is stored
    as it is does not keep the other rows alive."""
    slots, totals = left.indices.shape[2], left.totals and left.totals[rows]
    counts = [max(of_heads) for of_heads in left.held[rows]] if left.held else totals or [slots]
    unused = max(slots - max(counts), 0)
    threshold, noted = (None if part is None else part[rows].clone() for part in (left.merge_threshold, left.noted))
    return Kept(
        *(part[rows, :, unused:] for part in (left.keys, left.values, left.indices)),
        None if left.sums is None else left.sums[rows, :, unused:].clone(),
        threshold,
        noted,
        totals,
    )
