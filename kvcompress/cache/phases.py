"""What a layer does with the states of forward passes, one class per phase. `CompressedLayer.begin` selects a prompt's.

- `Prefill`: a first prompt, or a later one on a filled cache. It is attended over, compressed and stored.
- `resumed.ResumedPrefill`: a first prompt whose prefix is known.
- `LaterChunk`: a later chunk of a prompt in chunks. Entries are chosen from the stored ones and the chunk together.
- `Waiting`: between two passes, a prompt whose choice needs all layers.
- `Rereading`: the waiting prompt is read a second time.
- `answering.Answering`: the waiting prompt is answered.
- `Decoding`: a token, appended to the stored entries; from time to time, an eviction or an addition to their sums.
"""

from dataclasses import replace

import torch

from ..device import on_device
from ..errors import KVCompressError
from ..scoring.layer_view import Kept, all_slots
from ..scoring.rereading import received
from ..scoring.windows import pad_columns
from .choice import Choice
from .hiding import Hiding
from .joint_eviction import Evictions
from .memory import Memory
from .new_tokens import NewTokens
from .scope import Candidates, States, joined, right_aligned

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
EVERY = slice(None)


class Phase:
    """What a layer does with the states of the next forward pass."""

    is_first_prompt = False  # the cache was empty, so the model's own mask is right
    wants_sums = False  # whether the column sums of its attention are needed
    staged: KeysAndValues | None = None  # of the prompt being processed

    def __init__(self, choice: Choice, memory: Memory):
        self.choice, self.memory = choice, memory

    @property
    def length(self) -> int | torch.Tensor:
        """Number of tokens seen, pads included; see `Memory.length`."""
        return self.memory.length

    def all_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the queries of all staged tokens, given those that the layer has attended with."""
        return queries

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        """Take new states (batch, kv_heads, new, head_dim); return the keys and values to attend to."""
        raise self.never_compressed()

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor | None:
        """Return which stored and new entries those `rows` of `query_length` new queries see: bool (batch, 1 or
        kv_heads, rows, keys), True = attend; None if every query sees every key."""
        raise self.never_compressed()

    def after_attention(self, states: States) -> "Phase":
        """Finish a pass after the layer's attention, and return the phase for the next one."""
        raise self.never_compressed()

    def never_compressed(self) -> KVCompressError:
        """Return the error for states that come before the prompt before them was compressed."""
        return KVCompressError(
            f"layer {self.choice.layer_idx} was never compressed: the model's attention does not go through "
            "transformers' attention interface, or the model is not inside kvcompress.compress(...)"
        )


class Decoding(Phase):
    """A token that is handed to the storage before it is attended to. One object serves a whole answer, so that
    compiled graphs stay valid."""

    def __init__(self, choice: Choice, memory: Memory, hiding: Hiding | None, evictions: Evictions):
        super().__init__(choice, memory)
        policy, self._hiding, self._evictions = choice.policy, hiding, evictions
        self._remembers = policy.decode is not None or policy.carries_sums
        self.has_work = self._remembers or hiding is not None  # after the attention

    @property
    def hidden(self) -> torch.Tensor | None:
        """The slots that this layer does not see in the current step: bool (batch, slots), or None."""
        if self._hiding is None or self.choice.layer_idx < self._hiding.first_layer:
            return None
        return self._hiding.hidden

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        storage, keys = self.memory.storage, self.choice.policy.cluster.as_stored(keys)
        with torch.no_grad():
            storage.append(keys, values)
        return (keys, values) if storage.decodes_in_place and self.hidden is None else storage.read()

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor | None:
        visible = self.memory.storage.visible()
        if (hidden := self.hidden) is not None:
            shown = ~hidden[:, None].to(self.memory.log.kept.device)
            visible = shown if visible is None else visible & shown
        return None if visible is None else visible[:, :, None]

    def after_attention(self, states: States) -> Phase:
        if self._hiding is not None and self.choice.layer_idx == self._hiding.first_layer - 1:
            self._hiding.choose(self.memory, self.memory.kept, self.memory.seen, states.queries, states.scaling)
        if self._remembers:
            self.memory.remember(self.choice.latest(states.queries, states.rotary))
            self.memory.decoded += states.queries.shape[2]
            if self.memory.decoded >= self.choice.policy.settling_interval:
                if self.choice.policy.decode is None:
                    self.choice.settle(self.memory, states)
                else:
                    self._evictions.add(self.choice, self.memory, states)
        return self


class Prefill(Phase):
    """A prompt: its states are staged, attended over, compressed and stored. The full prompt's keys and values of a
    layer are freed as soon as that layer is done.

    Attributes:
        tokens: facts about the prompt.
        first: number of tokens seen before it.
        then: the phase after the prompt is stored.
    """

    def __init__(self, choice: Choice, memory: Memory, tokens: NewTokens, then: Decoding, all_whole: bool = True):
        """`all_whole` says whether no layer has dropped anything: where layers wait for each other, all do."""
        super().__init__(choice, memory)
        self.tokens, self.then, self.first = tokens, then, memory.seen
        self.is_first_prompt = memory.storage is None
        self._budgets = choice.budgets(tokens)
        # Whether the prompt is stored unchanged and unscored, with transformers' own shapes and bits.
        self._keeps_all = all_whole and memory.is_whole and self._budgets == tokens.context
        if choice.policy.decode is not None and memory.storage is not None and tokens.padding is not None:
            self._keeps_all = False  # an eviction expects pads in front of all entries

    @property
    def length(self) -> int:
        return self.first + (0 if self.staged is None else self.tokens.columns)

    @property
    def wants_sums(self) -> bool:
        policy = self.choice.policy
        return policy.sums_attention and not (self._keeps_all and not policy.carries_sums)

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        if self.staged is not None:
            raise self.never_compressed()
        self.staged = (keys, values)
        if self.memory.storage is None:
            return keys, values
        old, keys = self.memory.storage.read(), self.choice.policy.cluster.as_stored(keys)
        return torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2)

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor:
        device, batch = self.staged[0].device, len(self.tokens.lengths)
        visible = self.memory.storage.visible()
        if visible is None:
            visible = torch.ones(batch, 1, self.memory.stored, dtype=torch.bool, device=device)
        new = causal(query_length, query_length, self.tokens.pads(query_length, device), device, rows)
        new = new[:, None].expand(batch, visible.shape[1], -1, -1)
        return torch.cat([visible[:, :, None].expand(-1, -1, new.shape[2], -1), new], dim=-1)

    def after_attention(self, states: States) -> Phase:
        self.staged = None
        if self.choice.policy.carries_sums and self.memory.decoded:
            self.choice.settle(self.memory, states)
        self.memory.begin(self.tokens)
        return self._compress(replace(states, keys=self.choice.policy.cluster.as_stored(states.keys)))

    def _compress(self, states: States) -> Phase:
        """Store the entries that the cluster keeps, or let the prompt wait if the choice depends on all layers."""
        choice, memory, tokens = self.choice, self.memory, self.tokens
        if tokens.source is not None:  # a token method has chosen: everything that arrives is stored
            columns = tokens.source[:, None].expand(states.keys.shape[:3]).to(states.keys.device)
            totals = all_slots(columns) if tokens.padding is None else None
            memory.append_prompt(tokens, Kept(states.keys, states.values, columns, totals=totals))
            return self.then
        if choice.policy.moves_keys:
            memory.rotary = choice.rotary_to_move(states.rotary, self.first)
        view = choice.view(tokens, self._budgets, states, memory)
        if choice.policy.decode is not None:
            memory.remember(choice.latest(states.queries, states.rotary, view.padding))
        sums = choice.observe(states.queries, states.keys, view)
        if self._keeps_all:
            if max(tokens.context):  # of a question alone nothing is chosen: what choices left still holds
                sums, noted = choice.of_whole(states, view, tokens, sums)
                memory.note(tokens, memory.merge_threshold, noted)
            memory.append_whole_prompt(tokens, states.keys, states.values, sums)
            memory.log.add(tokens, on_device(tokens.lengths, states.keys.device, torch.float32))
            return self.then
        candidates = choice.candidates(states, view, tokens, sums)
        if max(tokens.context) == 0:
            question = candidates.with_sums(candidates.question)
            lasting = {"noted": memory.noted, "merge_threshold": memory.merge_threshold}
            memory.append_prompt(tokens, replace(question, **lasting))
        elif choice.waits:
            return Waiting(self, candidates, states)
        else:
            memory.append_prompt(tokens, choice.keep(candidates))
        return self.then


class LaterChunk(Prefill):
    """A later chunk of a prompt: it is appended to the stored entries, which are then reduced to the budget of all
    tokens so far, decoded ones included."""

    def _compress(self, states: States) -> Phase:
        choice, memory, tokens, log = self.choice, self.memory, self.tokens, self.memory.log
        keys, values, rotary = states.keys, states.values, states.rotary
        seen = self.first + tokens.columns
        padding = None if tokens.padding is None else tokens.padding.to(keys.device)
        log.join(tokens, self.first)
        if choice.policy.decode is not None:
            memory.remember(choice.latest(states.queries, rotary, padding))
        least = [0] * len(log.lengths) if log.protected is None else log.protected.entries
        budgets = [max(choice.policy.budget(length), some) for length, some in zip(log.lengths, least, strict=True)]
        is_unscored = choice.policy.decode is None and not choice.policy.carries_sums
        if is_unscored and budgets == log.lengths and memory.is_whole:
            memory.append_whole_prompt(tokens, keys, values, None)
            log.kept = on_device(budgets, keys.device, torch.float32)
            return self.then
        indices = torch.arange(self.first, seen, device=keys.device).expand(keys.shape[:3])
        queries = choice.unrotated(states.queries, rotary)
        if padding is not None:  # pads follow stored entries: NaN queries do not affect scores
            pads = pad_columns(padding, tokens.columns)
            indices, queries = indices.masked_fill(pads, -1), queries.masked_fill(pads.unsqueeze(-1), torch.nan)
            rotary = rotary and rotary.without_pads(padding)
        has_no_pads = memory.has_no_pads and padding is None
        both = joined(memory.kept(), Kept(keys, values, indices))
        both = both if has_no_pads else right_aligned(both)
        reduced = choice.reduce(
            both,
            memory,
            seen,
            budgets,
            replace(states, queries=queries, rotary=rotary),
            has_no_pads=has_no_pads,
            reading=True,
            stays=[not length for length in tokens.lengths],  # alone they would have no such chunk
            **tokens.vision_among(both.indices),
        )
        threshold = memory.merge_threshold if reduced.indices is both.indices else reduced.merge_threshold
        memory.note(tokens, threshold, reduced.noted)
        memory.replace_entries(reduced, seen)
        log.kept = (reduced.indices >= 0).sum(2).float().mean(1)
        return self.then


class Waiting(Phase):
    """A prompt that is kept whole until all layers' budgets are known.

    Attributes:
        candidates: the entries to choose among.
        scores: scores of their columns; None before a second pass.
        measured: the measurement for the layer budget rule, None if it measures nothing.
        states: of the whole prompt, with its last query alone; None if the prompt will not be answered.
    """

    def __init__(self, prompt: Prefill, candidates: Candidates, states: States):
        super().__init__(prompt.choice, prompt.memory)
        is_answered = prompt.choice.policy.cluster.second_pass == "answer"
        self.states = replace(states, queries=states.queries[:, :, -1:]) if is_answered else None
        self.tokens, self.then, self.candidates = prompt.tokens, prompt.then, candidates
        self.scores = self.measured = None
        self._length = prompt.first + prompt.tokens.columns
        if self.choice.policy.cluster.second_pass:
            nothing = torch.zeros(candidates.keys.shape[:3], dtype=torch.float32, device=candidates.keys.device)
            candidates.view = replace(candidates.view, received=nothing)
        else:
            self.assess()

    @property
    def length(self) -> int:
        return self._length

    def receive(self, received: torch.Tensor) -> None:
        """Take each candidate's score in a second pass, (batch, kv_heads, candidates)."""
        self.candidates.view = replace(self.candidates.view, received=received)
        self.states = None

    def assess(self) -> None:
        """Score and measure; the queries are then freed."""
        self.scores, self.measured = self.choice.assess(self.candidates)
        self.candidates.queries = None

    def finish(self, budgets: list[list[int]]) -> Phase:
        """Make the choice. `budgets` holds the evictable entries to keep, [layer][row]."""
        if self.choice.policy.layer_budget.is_measured:
            self.memory.log.shares = budgets
        of_layer = budgets[self.choice.place]
        self.memory.append_prompt(self.tokens, self.choice.keep_scored(self.candidates, self.scores, of_layer))
        return self.then


class Rereading(Phase):
    """A waiting prompt is read again, a chunk at a time. Nothing is stored; each layer records the attention that its
    entries receive.

    Attributes:
        waiting: the prompt.
        columns: LongTensor (batch, sinks + chunk), columns of the candidates: each row's sinks and the chunk.
        missing: bool (batch, sinks + chunk), True where a row has no such column.
    """

    def __init__(self, waiting: Waiting, columns: torch.Tensor, missing: torch.Tensor, sinks: int):
        super().__init__(waiting.choice, waiting.memory)
        self.waiting, self.columns, self.missing, self.sinks = waiting, columns, missing, sinks

    @property
    def length(self) -> int:
        return self.waiting.length

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        self._fed_keys = keys
        candidates = self.waiting.candidates
        return torch.cat([candidates.keys, keys], 2), torch.cat([candidates.values, values], 2)

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor:
        """Return a mask under which the tokens of the chunk see all candidates and, causally, themselves."""
        keys, padding = self.waiting.candidates.keys, self.waiting.candidates.view.padding
        old = torch.zeros(len(keys), keys.shape[2], dtype=torch.bool, device=keys.device)
        if padding is not None:
            old = pad_columns(padding, keys.shape[2])[:, 0]
        new = causal(query_length, query_length, self._fed_pads(query_length), keys.device, rows)
        return torch.cat([~old[:, None].expand(-1, new.shape[1], -1), new], dim=-1)[:, None]

    def after_attention(self, states: States) -> Phase:
        candidates, queries = self.waiting.candidates, states.queries
        rows = self.columns[:, None, :, None].expand(-1, candidates.keys.shape[1], -1, candidates.keys.shape[3])
        keys, fed_pads = candidates.keys.gather(2, rows), self._fed_pads(queries.shape[2])
        group_votes = self.choice.policy.cluster.group_votes
        found = received(queries, keys, self._fed_keys, self.missing, fed_pads, states.scaling, group_votes)
        # Missing columns received nothing, so it does not matter where they are recorded.
        candidates.view.received.scatter_reduce_(2, rows[:, :, self.sinks :, 0], found[..., self.sinks :], "amax")
        return self.waiting

    def _fed_pads(self, fed: int) -> torch.Tensor:
        """Return bool (batch, fed): the chunk's missing tokens, after an instruction that every row has."""
        pads = self.missing[:, self.sinks :]
        return torch.nn.functional.pad(pads, (fed - pads.shape[1], 0))


def causal(
    queries: int, keys: int, pads: torch.Tensor | None, device: torch.device, rows: slice = EVERY
) -> torch.Tensor:
    """Return which of the `keys` latest tokens the last `queries` of them see: bool (1 or batch, queries, keys), or
    those `rows` of it.

    `pads` is bool (batch, keys). A pad query sees itself, so that its softmax is defined; its output is not used."""
    itself = torch.arange(keys - queries, keys, device=device)[rows, None]  # the column of each query
    column = torch.arange(keys, device=device)
    visible = (column <= itself)[None]
    return visible if pads is None else visible & ~pads[:, None] | (column == itself)
