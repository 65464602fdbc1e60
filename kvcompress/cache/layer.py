"""The life of a prompt in one layer of the cache: staged, attended over, compressed, stored, decoded behind, evicted.

How entries are laid out in memory is in storage.py; which of them stay is the cluster's choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import CacheLayerMixin

from ..errors import KVCompressError
from ..policy.policy import Policy
from ..scoring.budget import allocate
from ..scoring.layer_view import Kept, Prompt
from ..scoring.rereading import Reading, received
from ..scoring.rotary import Rotary
from ..scoring.windows import pad_columns
from .new_tokens import Chunk
from .scope import Part, context_part, evictable, joined, right_aligned, with_budgets
from .storage import DenseStorage, OffloadedStorage, QuantizedStorage, RaggedStorage, StaticStorage, Storage, store


@dataclass
class Pending:
    """A prompt that is kept whole until all layers' budgets are known.

    Attributes:
        scores: of the part's columns, None before a second pass.
        measured: what the rule for layer budgets wants to know, None where it wants nothing.
        fed_keys: in a second pass, the fed tokens' own keys (batch, kv_heads, fed, head_dim).
    """

    chunk: Chunk
    part: Part
    scores: torch.Tensor | None = None
    measured: torch.Tensor | None = None
    fed_keys: torch.Tensor | None = None


def _is_uniform(part: Part, prompt: Prompt) -> bool:
    """Whether every row and head of what is kept fills all slots."""
    equal = prompt.padding is None and len(set(prompt.budgets)) == 1
    return equal and part.rest is None and prompt.head_budget != "adaptive"


class CompressedLayer(CacheLayerMixin):
    """One layer: stages a prompt, lets the cluster choose, stores the choice, writes decoded tokens behind it.

    A prompt pass has two steps. `update` only stages the new states and returns everything that is attended over;
    after the attention, `after_attention` lets the cluster choose and stores its choice: the full prompt's keys and
    values of a layer are freed as soon as that layer is done.

    Attributes:
        storage: what is kept, None before the first prompt.
        counted: tokens seen; with static shapes those of the prompt, the storage counts the others.
        staged: keys and values of the prompt that is being processed.
        pending: a prompt whose choice waits for the other layers.
        reading: what of that prompt the model is reading again, for methods that do.
        layer_shares: what the layers kept of the latest prompt, [layer][row], where that was measured.
        memory: for a cluster that accumulates, its sum for every stored entry, (batch, kv_heads, entries).
        likeness: of the latest eviction, see `Kept.likeness`.
        chunk: what is known of that prompt; the cache sets it before the forward pass.
        vision: of a prompt in chunks, `Chunk.seen_vision` so far: one tensor, which all layers refer to.
        watch: called with the next prompt's queries, keys and scaling, by whoever wants to see the layer attend.
        rotary: how the pass rotates its queries, where the cluster wants them unrotated; see `CompressedCache.rotate`.
    """

    is_sliding = False

    def __init__(self, layer_idx: int, place: int, num_layers: int, policy: Policy, room: int | None):
        """`layer_idx`: the model's; `place`: among the `num_layers` layers that are compressed."""
        super().__init__()
        self.layer_idx, self.place, self.num_layers = layer_idx, place, num_layers
        self.policy, self.room = policy, room
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None  # transformers' names; the entries are in `storage`
        self.storage: Storage | None = None
        self.staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self.chunk: Chunk | None = None
        self.vision: torch.Tensor | None = None
        self.rotary: Rotary | None = None
        self.watch: Callable[[torch.Tensor, torch.Tensor, float], None] | None = None
        self.pending: Pending | None = None
        self.reading: Reading | None = None
        self.layer_shares: list[list[int]] | None = None
        self.memory: torch.Tensor | None = None
        self.likeness: torch.Tensor | None = None
        self.counted = self.decoded = self.prompt_columns = 0
        self.recent_queries: list[torch.Tensor] = []
        self.row_seeds: tuple[int, ...] = ()
        self.prompt_lengths: list[int] = []
        self.prompt_kept: torch.Tensor | None = None
        self.is_initialized = False

    # -- what transformers asks of a layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self.values = key_states.new_empty(0)  # Llama 3.2 Vision asks every layer for its size
        self.is_initialized = True

    @property
    def is_compileable(self) -> bool:
        """Whether a decode step is the same graph each time; `generate` then compiles it on a GPU."""
        return self.policy.engine.cache_implementation == "static"

    @property
    def seen(self) -> int:
        """Tokens seen, per row and including pads: the true position of the next token."""
        return int(self.get_seq_length())

    @property
    def stored(self) -> int:
        """Slots in use of the row and head that keeps most."""
        return 0 if self.storage is None else self.storage.length

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens seen; with static shapes a tensor on the device, so that no step waits for it."""
        if isinstance(self.storage, StaticStorage) and self.staged is None:
            return self.counted + self.storage.appended()
        return self.counted

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_compileable and self.storage is not None:  # only the padding of a second prompt is read off it
            return query_length, 0 if query_length == 1 else self.seen
        return self.stored + query_length, self.counted - self.stored

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """New states (batch, kv_heads, new, head_dim) in; the keys and values to attend over out."""
        if self.reading is not None:
            keys, values = self.pending.part.keys, self.pending.part.values
            self.pending.fed_keys = key_states
            return self._marked(torch.cat([keys, key_states], 2)), torch.cat([values, value_states], 2)
        if self.staged is not None or self.pending is not None:
            raise KVCompressError(
                f"layer {self.layer_idx} was never compressed: the model's attention does not go through "
                "transformers' attention interface, or the model is not inside kvcompress.compress(...)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.chunk is not None:
            self.counted = self.seen + self.chunk.columns
            self.staged = (key_states, value_states)
            if self.storage is not None:
                old = self.storage.read()
                key_states = torch.cat([old[0], key_states], dim=2)
                value_states = torch.cat([old[1], value_states], dim=2)
        elif self.storage is not None:
            with torch.no_grad():
                self.storage.append(key_states, value_states)
            if not self.is_compileable:  # a graph must not count in Python: it would be another graph at each step
                self.counted += key_states.shape[2]
                self.decoded += key_states.shape[2]
            if not isinstance(self.storage, RaggedStorage):  # its entries are attended to where they lie
                key_states, value_states = self.storage.read()
        else:
            raise KVCompressError(
                "a CompressedCache was given to a model that is not inside kvcompress.compress(...) or attach(...)"
            )
        return self._marked(key_states), value_states

    def _marked(self, keys: torch.Tensor) -> torch.Tensor:
        """The attention function receives this very object: this is how it finds its layer."""
        keys = keys.view_as(keys)
        keys.kv_layer = self
        return keys

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.storage is not None:
            rows = torch.arange(len(self.prompt_lengths))
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.storage is None:
            return
        indices = indices.to(self.device)
        self.storage.select(indices)
        self.prompt_kept = self.prompt_kept[indices]
        self.recent_queries = [queries[indices] for queries in self.recent_queries]
        self.memory = None if self.memory is None else self.memory[indices]
        self.likeness = None if self.likeness is None else self.likeness[indices]
        self.vision = None if self.vision is None else self.vision[indices.to(self.vision.device)]
        rows = indices.tolist()
        self.prompt_lengths = [self.prompt_lengths[row] for row in rows]
        self.row_seeds = tuple(self.row_seeds[row] for row in rows)
        if self.layer_shares is not None:
            self.layer_shares = [[layer[row] for row in rows] for layer in self.layer_shares]

    def snapshot(self) -> dict[str, object]:
        """The layer's state; what is appended from now on does not touch it."""
        saved = {**self.__dict__, "recent_queries": list(self.recent_queries)}
        if self.storage is not None:
            self.storage = self.storage.fork()
        return saved

    def restore(self, saved: dict[str, object]) -> None:
        """Go back to a snapshot."""
        self.__dict__.update(saved)

    def forget_last(self) -> None:
        """Drop the last token of the prompt that was just compressed, so that it can be fed again."""
        kept = self._kept(self.seen)
        last = kept.indices == self.seen - 1
        rest = right_aligned(replace(kept, indices=kept.indices.masked_fill(last, -1)))
        self._put(rest)
        # The token that is fed again is stored in every head, whether the cluster had kept it or not.
        self.prompt_kept = self.prompt_kept + 1 - last.any(2).float().mean(1)
        self.counted -= 1
        self.recent_queries = [queries[:, :, :-1] for queries in self.recent_queries]

    # -- what the attention function asks of a layer

    @property
    def is_prompt(self) -> bool:
        """True while the first prompt is staged: nothing is stored before it, so the model's own mask is right."""
        return self.staged is not None and self.storage is None

    @property
    def is_decoding(self) -> bool:
        """True while a token is processed that is stored already."""
        return self.staged is None and self.reading is None

    def mask(self, query_length: int) -> torch.Tensor | None:
        """What `query_length` new queries may see of the stored entries and of themselves.

        Returns:
            bool (batch, 1 or kv_heads, query_length, keys), True = attend; None where every query sees every key.
        """
        if self.reading is not None:
            return self._mask_of_reading(query_length)
        visible = self.storage.visible()
        if self.staged is None:  # decode: the new token is stored already
            return None if visible is None else visible[:, :, None]
        batch = len(self.chunk.lengths)
        if visible is None:
            visible = torch.ones(batch, 1, self.stored, dtype=torch.bool, device=self.device)
        new = torch.ones(query_length, query_length, dtype=torch.bool, device=self.device).tril()
        new = new.expand(batch, visible.shape[1], -1, -1)
        if self.chunk.padding is not None:
            # A pad query sees itself, so that its softmax is defined; nobody reads its output.
            itself = torch.eye(query_length, dtype=torch.bool, device=self.device)
            pads = pad_columns(self.chunk.padding.to(self.device), query_length)
            new = new & ~pads[:, :, None] | itself
        return torch.cat([visible[:, :, None].expand(-1, -1, query_length, -1), new], dim=-1)

    def _mask_of_reading(self, query_length: int) -> torch.Tensor:
        """The tokens of a second pass see the whole part, and themselves causally. As in `mask`."""
        part = self.pending.part
        old = torch.zeros(len(part.keys), part.keys.shape[2], dtype=torch.bool, device=self.device)
        if part.prompt.padding is not None:
            old = pad_columns(part.prompt.padding, part.keys.shape[2])[:, 0]
        pads = torch.nn.functional.pad(self.reading.pads, (query_length - self.reading.pads.shape[1], 0))
        itself = torch.eye(query_length, dtype=torch.bool, device=self.device)
        new = torch.ones_like(itself).tril() & ~pads[:, None] | itself
        return torch.cat([~old[:, None].expand(-1, query_length, -1), new], dim=-1)[:, None]

    @torch.no_grad()
    def after_attention(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module) -> None:
        """Compress a staged prompt; while decoding, evict when it is time. `queries`: (batch, heads, new, head_dim);
        `module`: the model's attention module."""
        if self.rotary is not None:  # it is where the first layer is
            self.rotary = self.rotary.to(queries.device)
        if self.reading is not None:
            part, chunk = self.pending.part, self.reading.chunk
            keys = part.keys[:, :, chunk], self.pending.fed_keys
            part.prompt.read_again[..., chunk] = received(queries, *keys, self.reading.pads, scaling)
        elif self.staged is not None:
            self._compress(queries, scaling, module)
        elif self.policy.decode is not None:
            self._remember(queries)
            if self.decoded >= self.policy.decode_interval:
                self._evict(scaling, module)

    # -- compression

    def _compress(self, queries: torch.Tensor, scaling: float, module: torch.nn.Module) -> None:
        """Store what the cluster keeps of the staged prompt; where that depends on all layers, get ready for it."""
        (keys, values), chunk = self.staged, self.chunk
        self.staged = self.chunk = None
        self.vision = chunk.seen_vision
        self.decoded, self.recent_queries = 0, []
        if self.watch is not None:
            self.watch(queries, keys, scaling)
            self.watch = None
        if chunk.source is not None:  # a token method has chosen: all that came so far is stored
            columns = chunk.source[:, None].expand(keys.shape[:3]).to(keys.device)
            self._settle(chunk, Kept(keys, values, columns), uniform=chunk.padding is None)
            return
        if self.policy.engine.prefill_chunk is not None and self.storage is not None:
            self._join(queries, keys, values, chunk, scaling, module)
            self.rotary = None
            return
        budgets = self._budgets(chunk)
        prompt = self._prompt(chunk, budgets, scaling, module, keys.device)
        if self.policy.decode is not None:
            self._remember(queries, prompt.padding)
        self.rotary = None
        sums = self._observe(queries, keys, prompt)
        if budgets == chunk.context and self._is_whole:
            # Nothing to drop: pads stay too, so that every shape is that of transformers' own cache.
            pads = None if prompt.padding is None else pad_columns(prompt.padding, chunk.columns)[:, 0]
            self._store_whole(keys, values, pads, sums)
            self._count(chunk, torch.tensor(chunk.lengths, device=keys.device, dtype=torch.float32))
            return
        part = Part(queries, keys, values, replace(prompt, accumulated=sums))
        if chunk.context != chunk.lengths:
            part = context_part(queries, keys, values, prompt, chunk.context)
            part.sums = sums
        if max(chunk.context) == 0:
            self._settle(chunk, part.remembered(part.rest), uniform=False)
            return
        if part.sums is not None:
            part.prompt = replace(part.prompt, accumulated=self._observe(part.queries, part.keys, part.prompt))
        cluster, rule = self.policy.cluster, self.policy.layer_budget
        if rule.is_measured or cluster.second_pass:
            self.pending = Pending(chunk, part)
            if cluster.second_pass:
                nothing = torch.zeros(part.keys.shape[:3], device=keys.device)
                part.prompt = replace(part.prompt, read_again=nothing)
            else:
                self.assess()
            return
        prompt = with_budgets(part.prompt, rule.budgets(evictable(part.prompt))[self.place])
        kept = cluster.update_kv(self._for_cluster(part), part.keys, part.values, prompt)
        self._settle(chunk, part.in_prompt(kept), uniform=_is_uniform(part, prompt))

    def assess(self) -> None:
        """Score and measure the prompt that waits; its queries are then freed."""
        part, rule = self.pending.part, self.policy.layer_budget
        scores = self.policy.cluster.score(self._for_cluster(part), part.keys, part.values, part.prompt)
        self.pending.scores = scores
        if rule.is_measured:
            self.pending.measured = rule.measure(part.queries, part.keys, part.values, scores, part.prompt)
        part.queries = None

    def finish(self, budgets: list[list[int]]) -> None:
        """Make the choice that waited for all layers. `budgets`: entries kept of the evictable ones, [layer][row]."""
        pending, self.pending, self.layer_shares = self.pending, None, budgets
        part = pending.part
        prompt = with_budgets(part.prompt, budgets[self.place])
        kept = self.policy.cluster.keep(pending.scores, part.keys, part.values, prompt)
        self._settle(pending.chunk, part.in_prompt(kept), uniform=_is_uniform(part, prompt))

    def _prompt(
        self, chunk: Chunk, budgets: list[int], scaling: float, module: torch.nn.Module, device: torch.device
    ) -> Prompt:
        vision = None if chunk.vision is None else chunk.vision.to(device)
        text = None
        if self.policy.engine.ratio_of == "vision":
            text = tuple(n - images for n, images in zip(chunk.context, chunk.vision_lengths, strict=True))
        return Prompt(
            lengths=chunk.lengths,
            budgets=budgets,
            padding=None if chunk.padding is None else chunk.padding.to(device),
            vision=vision,
            frame_tokens=chunk.frame_tokens,
            protected=None if text is None else ~vision,
            protected_lengths=text or (),
            row_seeds=chunk.row_seeds,
            **self._constants(scaling, module),
        )

    def _constants(self, scaling: float, module: torch.nn.Module) -> dict[str, object]:
        """The fields of every `Prompt` of this layer."""
        engine = self.policy.engine
        return {
            "layer_idx": self.place,
            "num_layers": self.num_layers,
            "scaling": scaling,
            "module": module,
            "rotary": self.rotary,
            "window": self.policy.cluster.query_window,
            "cluster": self.policy.cluster,
            "head_budget": self.policy.head_budget,
            "safeguard": self.policy.part("safeguard"),
            "pyramid_beta": engine.pyramid_beta,
            "merge": self.policy.part("merge"),
            "merge_modality": engine.merge_modality,
            "likeness": self.likeness,
        }

    def _for_cluster(self, part: Part) -> torch.Tensor:
        """A prompt's queries as the cluster wants them."""
        return self._unrotated(part.queries, part.prompt.rotary)

    def _unrotated(self, queries: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        if not self.policy.cluster.unrotated_queries:
            return queries
        if rotary is None:
            raise KVCompressError(
                f"layer {self.layer_idx} does not know how its queries are rotated: give cache.rotate(...) what "
                "kvcompress.hooks.rotary.watch_rotary receives"
            )
        return rotary.unrotated(queries)

    def _observe(self, queries: torch.Tensor, keys: torch.Tensor, prompt: Prompt) -> torch.Tensor | None:
        return self.policy.cluster.observe(queries, keys, prompt) if self.policy.accumulates else None

    def _settle(self, chunk: Chunk, kept: Kept, uniform: bool) -> None:
        """Store what is kept of a prompt. `uniform`: it is known that no slot is unused."""
        first = self.seen - chunk.columns
        self.likeness = kept.likeness
        self._count(chunk, (kept.indices >= 0).sum(2).float().mean(1))
        self._store(replace(kept, indices=torch.where(kept.indices < 0, -1, kept.indices + first)), first, uniform)

    def _count(self, chunk: Chunk, kept: torch.Tensor) -> None:
        """Note a prompt of which `kept` entries (batch,) were stored, in the mean over KV heads."""
        self.prompt_kept = kept if self.prompt_kept is None else self.prompt_kept + kept
        before = self.prompt_lengths or [0] * len(chunk.lengths)
        self.prompt_lengths = [a + b for a, b in zip(before, chunk.lengths, strict=True)]
        self.prompt_columns += chunk.columns
        self.row_seeds = chunk.row_seeds

    def _budgets(self, chunk: Chunk) -> list[int]:
        """Entries to keep of each row's context, per KV head."""
        if self.policy.tokens is not None:
            return chunk.context
        if self.policy.engine.ratio_of == "prompt":
            return [self.policy.budget(length) if length else 0 for length in chunk.context]
        return [
            length - images + (self.policy.budget(images) if images else 0)
            for length, images in zip(chunk.context, chunk.vision_lengths, strict=True)
        ]

    def _join(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        chunk: Chunk,
        scaling: float,
        module: torch.nn.Module,
    ) -> None:
        """Put a later chunk of a prompt behind what is stored, and bring both together down to the budget of all the
        tokens so far, decoded ones included. `queries`, `keys`, `values`: the chunk's."""
        first = self.seen - chunk.columns
        pads = None if chunk.padding is None else pad_columns(chunk.padding.to(keys.device), chunk.columns)
        answer = first - self.prompt_columns
        self.prompt_lengths = [a + answer + b for a, b in zip(self.prompt_lengths, chunk.lengths, strict=True)]
        self.prompt_columns, self.row_seeds = self.seen, chunk.row_seeds
        if self.policy.decode is not None:
            self._remember(queries, chunk.padding)
        budgets = [self.policy.budget(n) if n else 0 for n in self.prompt_lengths]
        if budgets == self.prompt_lengths and self._is_whole and not self.policy.accumulates:
            self._store_whole(keys, values, None if pads is None else pads[:, 0], None)
            self.prompt_kept = torch.tensor(budgets, device=keys.device, dtype=torch.float32)
            return
        indices = torch.arange(first, self.seen, device=keys.device).expand(keys.shape[:3])
        queries = self._unrotated(queries, self.rotary)
        if pads is not None:  # they stand behind stored entries, which they would vote for: NaN has no vote
            indices, queries = indices.masked_fill(pads, -1), queries.masked_fill(pads.unsqueeze(-1), torch.nan)
        both = right_aligned(joined(self._kept(first), Kept(keys, values, indices)))
        vision = self._vision_of(both, chunk)
        both = self._reduced(both, queries, queries, self.prompt_lengths, budgets, scaling, module, vision)
        self._put(both)
        self.prompt_kept = (both.indices >= 0).sum(2).float().mean(1)

    def _vision_of(self, kept: Kept, chunk: Chunk) -> dict[str, object]:
        """What is known of vision tokens among entries of the prompt so far, as fields of `Prompt`."""
        if chunk.seen_vision is None:
            return {}
        seen, columns = chunk.seen_vision.to(kept.indices.device), kept.indices.clamp(min=0)
        is_vision, rank = (
            known[:, None].expand(-1, columns.shape[1], -1).gather(2, columns) for known in (seen, seen.cumsum(1) - 1)
        )
        is_vision = is_vision & (kept.indices >= 0)
        return {"vision": is_vision, "vision_rank": rank, "frame_tokens": chunk.frame_tokens}

    def _evict(self, scaling: float, module: torch.nn.Module) -> None:
        """Bring the stored entries, decoded ones included, back to the decode budget."""
        answer = self.seen - self.prompt_columns
        tokens = [length + answer for length in self.prompt_lengths]  # of each row, evicted ones included
        queries = torch.cat(self.recent_queries, dim=2) if self.recent_queries else None
        new = None if queries is None else queries[:, :, -self.decoded :]
        budgets = [self.policy.decode(n) for n in tokens]
        kept = self._kept(self.seen)
        reduced = self._reduced(kept, queries, new, tokens, budgets, scaling, module)
        self.decoded = 0
        if reduced.indices is kept.indices:  # all of it stays where it is
            self.memory = reduced.memory
        else:
            self._put(reduced)

    def _reduced(
        self,
        kept: Kept,
        queries: torch.Tensor | None,
        new: torch.Tensor | None,
        tokens: list[int],
        budgets: list[int],
        scaling: float,
        module: torch.nn.Module,
        vision: dict[str, object] | None = None,
    ) -> Kept:
        """What stays of entries that were stored and of newer ones.

        Args:
            kept: all of them.
            queries: the latest, for a cluster that scores with them.
            new: those of them that a cluster that accumulates has not seen.
            tokens, budgets: tokens of each row so far, and entries to keep of them in the mean over the layers.
            vision: what is known of vision tokens, as fields of `Prompt`.

        Returns:
            What the cluster keeps; where that is everything, `kept` with what it now remembers.
        """
        used = kept.indices >= 0
        entries = used.sum(-1).amax(1).tolist()
        prompt = Prompt(
            lengths=tokens,
            budgets=budgets,
            padding=(~used).sum(-1),
            row_seeds=self.row_seeds,
            columns=kept.indices,
            seen=self.seen,
            tokens=tuple(tokens),
            **(vision or {}),
            **self._constants(scaling, module),
        )
        if self.policy.accumulates:
            prompt = replace(prompt, accumulated=kept.memory + self._added(new, kept.keys, prompt))
            kept = replace(kept, memory=prompt.accumulated)
        # Layers share a row's budget out by its tokens, which are the same for all, not by what each happens to hold.
        shares = self._decode_shares(prompt)
        budgets = [min(share, held) for share, held in zip(shares, entries, strict=True)]
        if budgets == entries:
            return kept
        window = self.policy.cluster.query_window
        if queries is not None and window:
            queries = queries[:, :, -window:]
        result = self.policy.cluster.update_kv(
            queries, kept.keys, kept.values, replace(prompt, lengths=entries, budgets=budgets)
        )
        self.likeness = result.likeness
        columns = kept.indices.gather(2, result.indices.clamp(min=0)).masked_fill(result.indices < 0, -1)
        return replace(result, indices=columns)

    def _added(self, queries: torch.Tensor, keys: torch.Tensor, prompt: Prompt, block: int = 128) -> torch.Tensor:
        """What the latest queries add to each entry, a block of them at a time, so that memory is `block` rows."""
        sums = torch.zeros(keys.shape[:3], device=keys.device)
        for start in range(0, queries.shape[2], block):
            some = queries[:, :, start : start + block]
            seen = prompt.seen - queries.shape[2] + start + some.shape[2]
            sums += self.policy.cluster.observe(some, keys, replace(prompt, seen=seen))
        return sums

    def _decode_shares(self, prompt: Prompt) -> list[int]:
        """This layer's budget of each row. Shares that were measured in the prompt stay as they were."""
        if self.layer_shares is None:
            rule = self.policy.layer_budget
            return prompt.budgets if rule.is_measured else rule.budgets(prompt)[self.place]
        return [
            allocate([layer[row] for layer in self.layer_shares], budget * self.num_layers, length)[self.place]
            for row, (budget, length) in enumerate(zip(prompt.budgets, prompt.lengths, strict=True))
        ]

    def _kept(self, seen: int) -> Kept:
        """All that is stored, with what is remembered of it; tokens appended since have nothing yet."""
        kept = self.storage.kept(seen)
        if not self.policy.accumulates:
            return kept
        known = kept.keys.new_zeros(*kept.indices.shape[:2], 0).float() if self.memory is None else self.memory
        new = kept.indices.shape[2] - known.shape[2]
        return replace(kept, memory=torch.nn.functional.pad(known, (0, new)))

    def _remember(self, queries: torch.Tensor, padding: torch.Tensor | None = None) -> None:
        """Keep the last queries, as many as the cluster scores with, and as it wants them."""
        window = self.policy.query_window
        if not window:
            return
        recent = self._unrotated(queries[:, :, -window:], self.rotary)
        if padding is not None:
            # The pads of a second prompt stand behind stored entries, which they would vote for: NaN has no vote.
            pads = pad_columns(padding, queries.shape[2])[:, :, -window:]
            recent = recent.masked_fill(pads.unsqueeze(-1), torch.nan)
        self.recent_queries.append(recent.clone())  # a view would keep all of the prompt's alive
        if len(self.recent_queries) > 2 * window:
            self.recent_queries = [torch.cat(self.recent_queries, dim=2)[:, :, -window:]]

    # -- storage

    @property
    def _is_whole(self) -> bool:
        """Nothing was dropped so far, and another prompt can be put behind it in one piece."""
        if isinstance(self.storage, (DenseStorage, StaticStorage, OffloadedStorage)):
            return self.storage.is_whole
        return self.storage is None

    @property
    def keeps_all(self) -> bool:
        """Whether the staged prompt is going to be stored as it is, unscored."""
        return self._budgets(self.chunk) == self.chunk.context and self._is_whole and not self.policy.accumulates

    def _store_whole(self, keys, values, pads: torch.Tensor | None, memory: torch.Tensor | None) -> None:
        if memory is not None and self.storage is not None:
            memory = torch.cat([self._kept(self.seen - keys.shape[2]).memory, memory], dim=2)
        self.memory = memory
        if self.storage is not None:
            hidden = self.storage.visible()
            if hidden is not None or pads is not None:
                empty = torch.zeros(len(keys), self.stored, dtype=torch.bool, device=keys.device)
                before = empty if hidden is None else ~hidden[:, 0]
                pads = torch.cat([before, keys.new_zeros(len(keys), keys.shape[2]).bool() if pads is None else pads], 1)
            old = self.storage.read()
            keys, values = torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2)
        self.storage = self._new_storage(keys, values, None, pads)

    def _store(self, kept: Kept, first: int, uniform: bool) -> None:
        """Put a compressed chunk, whose columns begin at `first`, behind what is stored."""
        if isinstance(self.storage, QuantizedStorage):
            self.storage.extend(kept, first)  # what is quantized already stays as it is
            return
        if self.storage is not None:
            kept = right_aligned(joined(self._kept(first), kept))
            uniform = False
        self._put(kept, uniform)

    def _put(self, kept: Kept, uniform: bool = False) -> None:
        """Let this be all that is stored. Slots that no row and head uses are left out, also of what is remembered."""
        self.storage = self._new_storage(kept.keys, kept.values, kept.indices, None, uniform)
        self.memory = None if kept.memory is None else kept.memory[..., kept.indices.shape[2] - self.stored :]

    def _new_storage(self, keys, values, indices, pads, uniform: bool = False) -> Storage:
        """Arguments as in storage.py; `indices` None for a cache that keeps everything, which may hold pads."""
        engine, device = self.policy.engine, keys.device
        kind = engine.cache_implementation
        room = self.room if self.policy.decode is None else self.policy.decode_interval
        if kind.startswith("offloaded"):
            keys, values, indices, pads = (None if t is None else t.cpu() for t in (keys, values, indices, pads))
        if kind in ("static", "offloaded_static"):
            storage = StaticStorage(keys, values, indices, pads, self.room)
        elif kind == "quantized":
            storage = QuantizedStorage(keys, values, indices, pads, engine.quantizer, engine.kv_residual)
        elif indices is None:
            storage = DenseStorage(keys, values, None, pads, room)
        else:
            storage = store(Kept(keys, values, indices), room, uniform)
        return OffloadedStorage(storage, device) if kind.startswith("offloaded") else storage

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: spare room, index and what is remembered for evictions included."""
        tensors = [] if self.storage is None else self.storage.tensors()
        remembered = [] if self.memory is None else [self.memory]
        return sum(tensor.untyped_storage().nbytes() for tensor in [*tensors, *self.recent_queries, *remembered])
