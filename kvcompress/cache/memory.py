"""A layer's contents between two forward passes: the stored entries, and what later choices need to know about them."""

import copy
from dataclasses import dataclass, field, replace

import torch

from ..device import Arriving, on_device
from ..policy.policy import Policy
from ..scoring.layer_view import Kept
from ..scoring.rotary import Rotary
from .new_tokens import NewTokens
from .protected import Protected
from .scope import joined, right_aligned
from .storage.base import Storage
from .storage.new import new_storage
from .storage.think import kept_channels, query_power


@dataclass
class SequenceLog:
    """Facts about the sequence so far.

    Attributes:
        columns: columns of all prompts together.
        lengths: real prompt tokens of each row.
        kept: (batch,), how many of them were stored, as a mean over KV heads.
        row_seeds: see `NewTokens`.
        shares: entries that the layers kept of the latest prompt, [layer][row], if the budgets were measured.
        vision: `NewTokens.seen_vision` so far, for a prompt in chunks or if decode steps hide entries; all layers refer
            to one tensor.
        has_vision: whether any row has a vision token.
        protected: what `protect=` and `protect_text=` keep from evictions after the prompt; None without them.
        prompt_entries: how many entries of its prompts this layer holds in each row, as a mean over KV heads, rounded
            up; None until asked for.
    """

    columns: int = 0
    lengths: list[int] = field(default_factory=list)
    kept: torch.Tensor | None = None
    row_seeds: tuple[int, ...] = ()
    shares: list[list[int]] | None = None
    vision: torch.Tensor | None = None
    has_vision: bool = False
    protected: Protected | None = None
    prompt_entries: list[int] | Arriving | None = None

    def add(self, tokens: NewTokens, kept: torch.Tensor) -> None:
        """Record a prompt of which `kept` entries (batch,) were stored, as a mean over KV heads."""
        self.kept = kept if self.kept is None else self.kept + kept
        self.prompt_entries = None if self.protected is None else Arriving(self.kept.ceil().int())
        before = self.lengths or [0] * len(tokens.lengths)
        self.lengths = [a + b for a, b in zip(before, tokens.lengths, strict=True)]
        self.columns += tokens.columns
        self.row_seeds = tokens.row_seeds

    def join(self, tokens: NewTokens, first: int) -> None:
        """Record a later chunk that starts at column `first`. Tokens decoded before it now count as prompt."""
        answer = first - self.columns
        self.lengths = [a + answer + b for a, b in zip(self.lengths, tokens.lengths, strict=True)]
        self.columns = first + tokens.columns
        self.row_seeds = tokens.row_seeds

    def lengths_at(self, seen: int) -> list[int]:
        """Return the real tokens of each row among `seen` columns, decoded ones included."""
        return [length + seen - self.columns for length in self.lengths]

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        order = rows.tolist()
        self.lengths = [self.lengths[row] for row in order]
        self.row_seeds = tuple(self.row_seeds[row] for row in order)
        self.kept = self.kept[rows]
        if self.shares is not None:
            self.shares = [[layer[row] for row in order] for layer in self.shares]
        self.vision = None if self.vision is None else self.vision[rows.to(self.vision.device)]
        self.protected, self.prompt_entries = self.protected and self.protected.rows(rows), None

    def held_of_prompt(self) -> list[int]:
        """Return `prompt_entries`."""
        if self.prompt_entries is None:
            self.prompt_entries = Arriving(self.kept.ceil().int())
        if isinstance(self.prompt_entries, Arriving):
            self.prompt_entries = self.prompt_entries.tolist()
        return self.prompt_entries


class Memory:
    """The contents of one layer.

    Attributes:
        storage: the stored entries, None before the first prompt.
        sums: if the policy carries sums, those of every stored entry, (batch, kv_heads, entries).
        merge_threshold, noted: those of the latest eviction, see `Kept`.
        rotary: the rotation of the prompt, if keys are moved.
        decoded: tokens since the latest eviction or addition to the sums, if decoding evicts or sums are carried.
        latest_queries: the queries that the next of these needs, in pieces (batch, heads, some, head_dim).
        attended: for a method that hides entries in decode steps, the latest token's attention to all slots stored
            then, (batch, slots).
        query_power: if keys lose channels, until these are chosen, see `storage.think.query_power`.
        answer_scores: how much the answer needs each column of the latest prompt, (batch, kv_heads, columns), if the
            model answers first. It is not used by the cache itself.
    """

    def __init__(self, policy: Policy, room: int | None):
        """`room` is the number of new tokens to allocate room for in advance."""
        self._policy, self._room = policy, room
        self.storage: Storage | None = None
        self.sums: torch.Tensor | None = None
        self.merge_threshold: torch.Tensor | None = None
        self.noted: torch.Tensor | None = None
        self.rotary: Rotary | None = None
        self.decoded = 0
        self.latest_queries: list[torch.Tensor] = []
        self.attended: torch.Tensor | None = None
        self.query_power: torch.Tensor | None = None
        self.answer_scores: torch.Tensor | None = None
        self.log = SequenceLog()
        self._seen_when_stored = 0

    # -- contents

    @property
    def length(self) -> int | torch.Tensor:
        """Number of tokens seen, per row and including pads; with static shapes a tensor, so that no step waits for
        it."""
        return self._seen_when_stored + (0 if self.storage is None else self.storage.appended)

    @property
    def seen(self) -> int:
        """`length` as an integer: the true position of the next token."""
        return int(self.length)

    def check_room(self, seen: int) -> None:
        """Raise KVCompressError if there is no room for so many tokens, pads and those stored already included."""
        if self.storage is not None:
            self.storage.check_room(seen - self._seen_when_stored)

    @property
    def stored(self) -> int:
        """Number of slots in use in the row and head that keeps most."""
        return 0 if self.storage is None else self.storage.length

    @property
    def is_whole(self) -> bool:
        """Whether nothing was dropped so far and another prompt can be appended in one piece."""
        return self.storage is None or self.storage.is_whole

    @property
    def has_no_pads(self) -> bool:
        """Whether the host knows that every slot holds a token and that no prompt had pads."""
        full = self.storage is None or self.storage.fills_all_slots
        return full and all(length == self.log.columns for length in self.log.lengths)

    @property
    def has_fixed_shapes(self) -> bool:
        return self.storage is not None and self.storage.has_fixed_shapes

    def kept(self) -> Kept:
        """Return all stored entries with their sums, which are 0 for tokens appended since."""
        kept = self.storage.kept(self.seen)
        if not self._policy.carries_sums:
            return kept
        known = kept.keys.new_zeros(*kept.indices.shape[:2], 0).float() if self.sums is None else self.sums
        new = kept.indices.shape[2] - known.shape[2]
        return replace(kept, sums=torch.nn.functional.pad(known, (0, new)))

    def _without_room(self) -> Kept:
        """Return `kept` to be stored again, with new room."""
        kept, end = self.kept(), self.storage.filled
        if end == kept.indices.shape[2]:
            return kept
        sums = None if kept.sums is None else kept.sums[:, :, :end]
        keys, values, indices = (part[:, :, :end] for part in (kept.keys, kept.values, kept.indices))
        return replace(kept, keys=keys, values=values, indices=indices, sums=sums)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including spare room, index and what is kept for later evictions."""
        tensors = [] if self.storage is None else self.storage.tensors()
        known = [part for part in (self.sums, self.noted, self.attended) if part is not None]
        own = {id(tensor): tensor for tensor in [*tensors, *self.latest_queries, *known]}  # beams share quantized rows
        return sum(tensor.untyped_storage().nbytes() for tensor in own.values())

    # -- a prompt

    def record_query_power(self, queries: torch.Tensor, kv_heads: int, tokens: NewTokens) -> None:
        """Record the queries (batch, heads, new, head_dim) of a first prompt, by which channels are chosen."""
        if self._policy.engine.cache_implementation == "think" and self.storage is None:
            self.query_power = query_power(queries, kv_heads, tokens.padding)

    def begin(self, tokens: NewTokens) -> None:
        """Start a new prompt, after its attention, and drop what only the previous answer needed."""
        self.log.vision = tokens.seen_vision
        self.log.has_vision = self.log.has_vision or any(tokens.vision_lengths)
        if tokens.lasting is not None:
            self.log.protected = tokens.lasting.after(self.log.protected, self.seen)
        self.decoded, self.latest_queries, self.attended, self.answer_scores = 0, [], None, None

    def note(self, tokens: NewTokens, merge_threshold: torch.Tensor | None, noted: torch.Tensor | None) -> None:
        """Take over what the choice from a prompt leaves for the next one. In a row without a context, nothing was
        chosen, and what earlier choices left still holds."""
        for name, new in (("merge_threshold", merge_threshold), ("noted", noted)):
            old = getattr(self, name)
            if old is not None and new is not None and old.shape == new.shape and not all(tokens.context):
                has_context = on_device(tokens.context, new.device) > 0
                new = torch.where(has_context.view(-1, *[1] * (new.ndim - 1)), new, old)
            setattr(self, name, new)

    def append_prompt(self, tokens: NewTokens, kept: Kept) -> None:
        """Append the kept entries of a prompt to the stored ones. `kept.indices` are columns of that prompt."""
        first = self.seen
        self.note(tokens, kept.merge_threshold, kept.noted)
        if kept.fills_all_slots:
            rows, _, slots = kept.indices.shape
            self.log.add(tokens, kept.indices.new_full((rows,), slots, dtype=torch.float32))
        else:
            self.log.add(tokens, (kept.indices >= 0).sum(2).float().mean(1))
        if first:
            kept = replace(kept, indices=torch.where(kept.indices < 0, -1, kept.indices + first))
        if self.storage is not None and self.storage.is_final:
            self.storage.extend(kept, first)
            self._seen_when_stored = first + tokens.columns
            return
        if self.storage is not None:
            kept = right_aligned(joined(self._without_room(), kept))
        self.replace_entries(kept, first + tokens.columns)

    def append_whole_prompt(
        self, tokens: NewTokens, keys: torch.Tensor, values: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        """Append a whole prompt to the stored entries. Pads stay, so that all shapes equal those of transformers' own
        cache."""
        seen, pads = self.seen + tokens.columns, tokens.pads(tokens.columns, keys.device)
        if sums is not None and self.storage is not None:
            sums = torch.cat([self.kept().sums, sums], dim=2)
        self.sums = sums
        if self.storage is not None:
            hidden = self.storage.visible()
            if hidden is not None or pads is not None:
                empty = torch.zeros(len(keys), self.stored, dtype=torch.bool, device=keys.device)
                before = empty if hidden is None else ~hidden[:, 0]
                pads = torch.cat([before, keys.new_zeros(len(keys), keys.shape[2]).bool() if pads is None else pads], 1)
            old = self.storage.read()
            keys, values = torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2)
        self._store(keys, values, None, pads)
        self._seen_when_stored = seen

    # -- an eviction

    def replace_entries(self, kept: Kept, seen: int) -> None:
        """Replace the stored entries; `seen` is the number of tokens so far. Slots that no row and head uses are
        dropped."""
        self._store(kept.keys, kept.values, kept.indices, None, kept.totals)
        self.sums = None if kept.sums is None else kept.sums[..., kept.indices.shape[2] - self.stored :]
        self._seen_when_stored = seen

    def reduce_to(self, kept: Kept, reduced: Kept) -> None:
        """Replace the stored entries `kept` by `reduced`, which ends an eviction."""
        self.decoded = 0
        if reduced.indices is kept.indices:  # nothing was evicted
            self.sums = reduced.sums
            return
        self.merge_threshold, self.noted = reduced.merge_threshold, reduced.noted
        self.replace_entries(reduced, self.seen)

    def remember(self, queries: torch.Tensor | None) -> None:
        """Record the latest queries, see `Choice.latest`."""
        if queries is None:
            return
        window = self._policy.query_window
        is_view = queries.untyped_storage().nbytes() > queries.nbytes  # it would keep a whole prompt's memory alive
        self.latest_queries.append(queries.clone() if is_view else queries)
        if len(self.latest_queries) > 2 * window:
            self.latest_queries = [torch.cat(self.latest_queries, dim=2)[:, :, -window:]]

    # -- other changes

    def forget_last(self) -> None:
        """Drop the last token of the prompt just compressed, so that it can be fed again."""
        seen = self.seen
        if self.storage.is_final:
            last = self.storage.columns(seen) == seen - 1
            self.storage.forget(seen - 1, seen)
            self._seen_when_stored = seen - 1
        else:
            kept = self._without_room()
            last = kept.indices == seen - 1
            self.replace_entries(right_aligned(replace(kept, indices=kept.indices.masked_fill(last, -1))), seen - 1)
        # The token that is fed again is stored in every head, whether the cluster had kept it or not.
        self.log.kept, self.log.prompt_entries = self.log.kept + 1 - last.any(2).float().mean(1), None
        self.latest_queries = [queries[:, :, :-1] for queries in self.latest_queries]

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: LongTensor (rows,)."""
        self.storage.select(rows)
        self.log.select(rows)
        self.latest_queries = [queries[rows] for queries in self.latest_queries]
        for name in ("sums", "merge_threshold", "attended", "answer_scores", "noted"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value[rows])
        self.rotary = None if self.rotary is None else self.rotary.rows(rows)

    def fork(self) -> "Memory":
        """Return a memory that shares the present entries and can be appended to without changing this one."""
        twin = copy.copy(self)
        twin.storage = None if self.storage is None else self.storage.fork()
        twin.latest_queries, twin.log = list(self.latest_queries), copy.copy(self.log)
        return twin

    def state(self) -> dict[str, object]:
        """Return the contents for saving to a file: everything but the cache's options."""
        state = {name: value for name, value in vars(self).items() if name not in ("_policy", "_room")}
        return {**state, "log": replace(self.log, prompt_entries=None)}

    @classmethod
    def of_state(cls, policy: Policy, room: int | None, state: dict[str, object]) -> "Memory":
        """Create a memory from a saved `state`; other arguments as in the constructor."""
        memory = cls(policy, room)
        vars(memory).update(state)
        return memory

    def _store(self, keys, values, indices, pads, totals: list[int] | None = None) -> None:
        """Create a new storage. Arguments as in storage/new.py; `indices` is None for a cache that keeps everything,
        which may hold pads."""
        evicts = self._policy.decode is not None
        room = self._policy.decode_interval if evicts else self._room
        channels = self._channels(keys, indices, pads)
        self.storage = new_storage(self._policy.engine, keys, values, indices, pads, room, totals, channels)

    def _channels(self, keys, indices, pads) -> torch.Tensor | None:
        """Return the channels that keys have, or None for all. They are chosen when the first entries are stored."""
        engine, power = self._policy.engine, self.query_power
        if engine.cache_implementation != "think":
            return None
        if self.storage is not None:
            return self.storage.channels.long()
        self.query_power = None
        unused = (None if pads is None else pads[:, None]) if indices is None else indices < 0
        return kept_channels(power, keys, unused, engine.key_channels)
