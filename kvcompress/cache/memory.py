"""What a layer holds between two forward passes: the stored entries, and what later choices need to know of them."""

import copy
from dataclasses import dataclass, field, replace

import torch

from ..policy.policy import Policy
from ..scoring.layer_view import Kept
from ..scoring.rotary import Rotary
from ..scoring.windows import pad_columns
from .new_tokens import NewTokens
from .scope import joined, right_aligned
from .storage.base import Storage
from .storage.new import new_storage
from .storage.think import kept_channels, query_power


@dataclass
class SequenceLog:
    """What is known of the sequence so far.

    Attributes:
        columns: of all prompts together.
        lengths: real prompt tokens of each row.
        kept: how many of them were stored, (batch,), in the mean over KV heads.
        row_seeds: see `NewTokens`.
        shares: what the layers kept of the latest prompt, [layer][row], where that was measured.
        vision: of a prompt in chunks, or where decode steps hide entries, `NewTokens.seen_vision` so far: one tensor,
            which all layers refer to.
        has_vision: whether any row of it has a vision token.
    """

    columns: int = 0
    lengths: list[int] = field(default_factory=list)
    kept: torch.Tensor | None = None
    row_seeds: tuple[int, ...] = ()
    shares: list[list[int]] | None = None
    vision: torch.Tensor | None = None
    has_vision: bool = False

    def add(self, tokens: NewTokens, kept: torch.Tensor) -> None:
        """Note a prompt of which `kept` entries (batch,) were stored, in the mean over KV heads."""
        self.kept = kept if self.kept is None else self.kept + kept
        before = self.lengths or [0] * len(tokens.lengths)
        self.lengths = [a + b for a, b in zip(before, tokens.lengths, strict=True)]
        self.columns += tokens.columns
        self.row_seeds = tokens.row_seeds

    def join(self, tokens: NewTokens, first: int) -> None:
        """Note a later chunk, whose columns begin at `first`; what was decoded before it now belongs to the prompt."""
        answer = first - self.columns
        self.lengths = [a + answer + b for a, b in zip(self.lengths, tokens.lengths, strict=True)]
        self.columns = first + tokens.columns
        self.row_seeds = tokens.row_seeds

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        order = rows.tolist()
        self.lengths = [self.lengths[row] for row in order]
        self.row_seeds = tuple(self.row_seeds[row] for row in order)
        self.kept = self.kept[rows]
        if self.shares is not None:
            self.shares = [[layer[row] for row in order] for layer in self.shares]
        self.vision = None if self.vision is None else self.vision[rows.to(self.vision.device)]


class Memory:
    """One layer's.

    Attributes:
        storage: what is kept, None before the first prompt.
        sums: where sums are carried on, those of every stored entry, (batch, kv_heads, entries).
        merge_threshold, noted: of the latest eviction, see `Kept`.
        rotary: how the prompt is rotated, where keys are moved.
        decoded: tokens since the latest eviction, where decoding evicts.
        latest_queries: as many as the cluster scores with, in pieces (batch, heads, some, head_dim).
        attended: for a method that hides entries at decode steps, the latest token's attention to all that was stored
            then, (batch, slots).
        query_power: where keys lose channels, until these are chosen, see `storage.think.query_power`.
        foreseen: what the latest prompt's columns are worth to its answer, (batch, kv_heads, columns), where the answer
            is given first; a note about the method, and no part of the cache.
    """

    def __init__(self, policy: Policy, room: int | None):
        """`room`: tokens to come that get room at once."""
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
        self.foreseen: torch.Tensor | None = None
        self.log = SequenceLog()
        self._seen_when_stored = 0

    # -- what is there

    @property
    def length(self) -> int | torch.Tensor:
        """Tokens seen, per row and including pads; with static shapes a tensor, so that no step waits for it."""
        return self._seen_when_stored + (0 if self.storage is None else self.storage.appended)

    @property
    def seen(self) -> int:
        """As `length`: the true position of the next token."""
        return int(self.length)

    @property
    def stored(self) -> int:
        """Slots in use of the row and head that keeps most."""
        return 0 if self.storage is None else self.storage.length

    @property
    def is_whole(self) -> bool:
        """Nothing was dropped so far, and another prompt can be put behind it in one piece."""
        return self.storage is None or self.storage.is_whole

    @property
    def has_no_pads(self) -> bool:
        """The host knows that every slot holds a token, and that no prompt had pads."""
        full = self.storage is None or self.storage.fills_all_slots
        return full and all(length == self.log.columns for length in self.log.lengths)

    @property
    def has_fixed_shapes(self) -> bool:
        return self.storage is not None and self.storage.has_fixed_shapes

    def held(self) -> list[list[int]] | None:
        """Slots in use of what `kept` returns, [row][head], where the host knows how heads differ."""
        return self.storage.held()

    def kept(self) -> Kept:
        """All that is stored, with its sums; tokens appended since have none yet."""
        kept = self.storage.kept(self.seen)
        if not self._policy.carries_sums:
            return kept
        known = kept.keys.new_zeros(*kept.indices.shape[:2], 0).float() if self.sums is None else self.sums
        new = kept.indices.shape[2] - known.shape[2]
        return replace(kept, sums=torch.nn.functional.pad(known, (0, new)))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: spare room, index and what is remembered for evictions included."""
        tensors = [] if self.storage is None else self.storage.tensors()
        known = [part for part in (self.sums, self.noted, self.attended) if part is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in [*tensors, *self.latest_queries, *known])

    # -- a prompt

    def look_at(self, queries: torch.Tensor, kv_heads: int, tokens: NewTokens) -> None:
        """Know the queries (batch, heads, new, head_dim) of a prompt, by which channels are chosen; those of a first
        one stay for all that follows."""
        if self._policy.engine.cache_implementation == "think" and self.storage is None:
            self.query_power = query_power(queries, kv_heads, tokens.padding)

    def begin(self, tokens: NewTokens) -> None:
        """A prompt was attended to; what was remembered of the answer before it is not needed any more."""
        self.log.vision = tokens.seen_vision
        self.log.has_vision = self.log.has_vision or any(tokens.vision_lengths)
        self.decoded, self.latest_queries, self.attended = 0, [], None

    def settle(self, tokens: NewTokens, kept: Kept) -> None:
        """Store what is kept of a prompt behind what is stored. `kept.indices`: columns of that prompt."""
        first = self.seen
        self.merge_threshold, self.noted = kept.merge_threshold, kept.noted
        self.log.add(tokens, (kept.indices >= 0).sum(2).float().mean(1))
        kept = replace(kept, indices=torch.where(kept.indices < 0, -1, kept.indices + first))
        if self.storage is not None and self.storage.is_final:
            self.storage.extend(kept, first)
            self._seen_when_stored = first + tokens.columns
            return
        if self.storage is not None:
            kept = right_aligned(joined(self.kept(), kept))
        self.put(kept, first + tokens.columns)

    def settle_whole(
        self, tokens: NewTokens, keys: torch.Tensor, values: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        """Put a whole prompt behind what is stored. Pads stay too, so that every shape is that of transformers' own
        cache."""
        seen, pads = self.seen + tokens.columns, None
        if tokens.padding is not None:
            pads = pad_columns(tokens.padding.to(keys.device), tokens.columns)[:, 0]
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

    def put(self, kept: Kept, seen: int) -> None:
        """Let this be all that is stored of `seen` tokens. Slots that no row and head uses are left out."""
        self._store(kept.keys, kept.values, kept.indices, None, kept.total)
        self.sums = None if kept.sums is None else kept.sums[..., kept.indices.shape[2] - self.stored :]
        self._seen_when_stored = seen

    def reduce_to(self, kept: Kept, reduced: Kept, seen: int) -> None:
        """Let `reduced` be what is left of the stored entries `kept`. `seen`: tokens so far."""
        if reduced.indices is kept.indices:  # all of them stay where they are
            self.sums = reduced.sums
            return
        self.merge_threshold, self.noted = reduced.merge_threshold, reduced.noted
        self.put(reduced, seen)

    def remember(self, queries: torch.Tensor | None) -> None:
        """Keep the latest queries, see `Choice.latest`."""
        if queries is None:
            return
        window = self._policy.query_window
        is_part = queries.untyped_storage().nbytes() > queries.nbytes  # a view would keep all of the prompt's alive
        self.latest_queries.append(queries.clone() if is_part else queries)
        if len(self.latest_queries) > 2 * window:
            self.latest_queries = [torch.cat(self.latest_queries, dim=2)[:, :, -window:]]

    # -- other changes

    def forget_last(self) -> None:
        """Drop the last token of the prompt that was just compressed, so that it can be fed again."""
        seen = self.seen
        if self.storage.is_final:
            last = self.storage.columns(seen) == seen - 1
            self.storage.forget(seen - 1, seen)
            self._seen_when_stored = seen - 1
        else:
            kept = self.kept()
            last = kept.indices == seen - 1
            self.put(right_aligned(replace(kept, indices=kept.indices.masked_fill(last, -1))), seen - 1)
        # The token that is fed again is stored in every head, whether the cluster had kept it or not.
        self.log.kept = self.log.kept + 1 - last.any(2).float().mean(1)
        self.latest_queries = [queries[:, :, :-1] for queries in self.latest_queries]

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: LongTensor (rows,)."""
        self.storage.select(rows)
        self.log.select(rows)
        self.latest_queries = [queries[rows] for queries in self.latest_queries]
        self.sums = None if self.sums is None else self.sums[rows]
        self.merge_threshold = None if self.merge_threshold is None else self.merge_threshold[rows]
        self.attended = None if self.attended is None else self.attended[rows]
        self.foreseen = None if self.foreseen is None else self.foreseen[rows]
        self.noted = None if self.noted is None else self.noted[rows]
        self.rotary = None if self.rotary is None else self.rotary.rows(rows)

    def fork(self) -> "Memory":
        """A memory that shares the present entries and may go on from there; undone by dropping it."""
        twin = copy.copy(self)
        twin.storage = None if self.storage is None else self.storage.fork()
        twin.latest_queries, twin.log = list(self.latest_queries), copy.copy(self.log)
        return twin

    def state(self) -> dict[str, object]:
        """What a file holds of it: all but what the cache's options say."""
        return {name: value for name, value in vars(self).items() if name not in ("_policy", "_room")}

    @classmethod
    def of_state(cls, policy: Policy, room: int | None, state: dict[str, object]) -> "Memory":
        """The memory that had this `state`; other arguments as at first."""
        memory = cls(policy, room)
        vars(memory).update(state)
        return memory

    def _store(self, keys, values, indices, pads, total: int | None = None) -> None:
        """Arguments as in storage.py; `indices` None for a cache that keeps everything, which may hold pads."""
        evicts = self._policy.decode is not None
        room = self._policy.decode_interval if evicts else self._room
        channels = self._channels(keys, indices, pads)
        self.storage = new_storage(self._policy.engine, keys, values, indices, pads, room, total, channels)

    def _channels(self, keys, indices, pads) -> torch.Tensor | None:
        """Those that keys have, where they lose any: chosen when the first entries are stored."""
        engine, power = self._policy.engine, self.query_power
        if engine.cache_implementation != "think":
            return None
        if self.storage is not None:
            return self.storage.channels.long()
        self.query_power = None
        unused = (None if pads is None else pads[:, None]) if indices is None else indices < 0
        return kept_channels(power, keys, unused, engine.key_channels)
