"""The life of a prompt in one layer of the cache: staged, attended over, compressed, stored, decoded behind, evicted.

How entries are laid out in memory is in storage.py; which of them stay is the cluster's choice.
"""

from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from .chunk import Chunk
from .clusters.base import Kept, Prompt
from .errors import KVCompressError
from .policy import Policy
from .scoring import pad_columns
from .storage import DenseStorage, OffloadedStorage, QuantizedStorage, RaggedStorage, StaticStorage, Storage, store


def joined(parts: list[Kept]) -> Kept:
    """All slots of the parts, one behind the other."""
    return Kept(
        torch.cat([part.keys for part in parts], dim=2),
        torch.cat([part.values for part in parts], dim=2),
        torch.cat([part.indices for part in parts], dim=2),
    )


def _columns_of(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(batch, heads, width, head_dim): the given columns (batch, width) of each row of the states."""
    return states.gather(2, columns[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def right_aligned(kept: Kept) -> Kept:
    """The same entries with all unused slots, which may stand anywhere, at the front."""
    order = kept.indices.argsort(dim=-1, stable=True)
    rows = order.unsqueeze(-1)
    return Kept(
        kept.keys.gather(2, rows.expand(-1, -1, -1, kept.keys.shape[3])),
        kept.values.gather(2, rows.expand(-1, -1, -1, kept.values.shape[3])),
        kept.indices.gather(2, order),
    )


class CompressedLayer(CacheLayerMixin):
    """One layer: stages a prompt, lets the cluster choose, stores the choice, writes decoded tokens behind it.

    A prompt pass has two steps. `update` only stages the new states and returns everything that is attended over;
    after the attention, `after_attention` lets the cluster choose and stores its choice: the full prompt's keys and
    values of a layer are freed as soon as that layer is done.

    Attributes:
        storage: what is kept, None before the first prompt.
        counted: tokens seen; with static shapes those of the prompt, the storage counts the others.
        staged: keys and values of the prompt that is being processed.
        chunk: what is known of that prompt; the cache sets it before the forward pass.
    """

    is_sliding = False

    def __init__(self, layer_idx: int, num_layers: int, policy: Policy, room: int | None):
        super().__init__()
        self.layer_idx, self.num_layers, self.policy, self.room = layer_idx, num_layers, policy, room
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None  # transformers' names; the entries are in `storage`
        self.storage: Storage | None = None
        self.staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self.chunk: Chunk | None = None
        self.counted = self.decoded = self.prompt_columns = 0
        self.recent_queries: list[torch.Tensor] = []
        self.row_seeds: tuple[int, ...] = ()
        self.prompt_lengths: list[int] = []
        self.prompt_kept: torch.Tensor | None = None
        self.is_initialized = False

    # -- what transformers asks of a layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
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
        if self.staged is not None:
            raise KVCompressError(
                f"layer {self.layer_idx} was never compressed: the model's attention does not go through "
                "transformers' attention interface, or the model is not inside kvcompress.compress(...)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.chunk is not None:
            self.counted = self.seen + key_states.shape[2]
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
        # The attention function receives this very object: this is how it finds its layer.
        key_states = key_states.view_as(key_states)
        key_states.kv_layer = self
        return key_states, value_states

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
        rows = indices.tolist()
        self.prompt_lengths = [self.prompt_lengths[row] for row in rows]
        self.row_seeds = tuple(self.row_seeds[row] for row in rows)

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
        kept = self.storage.kept(self.seen)
        last = kept.indices == self.seen - 1
        rest = right_aligned(replace(kept, indices=kept.indices.masked_fill(last, -1)))
        self.storage = self._new_storage(rest.keys, rest.values, rest.indices, None)
        # The token that is fed again is stored in every head, whether the cluster had kept it or not.
        self.prompt_kept = self.prompt_kept + 1 - last.any(2).float().mean(1)
        self.counted -= 1
        self.recent_queries = [queries[:, :, :-1] for queries in self.recent_queries]

    # -- what the attention function asks of a layer

    @property
    def is_prompt(self) -> bool:
        """True while the first prompt is staged: nothing is stored before it, so the model's own mask is right."""
        return self.staged is not None and self.storage is None

    def mask(self, query_length: int) -> torch.Tensor | None:
        """What `query_length` new queries may see of the stored entries and of themselves.

        Returns:
            bool (batch, 1 or kv_heads, query_length, keys), True = attend; None where every query sees every key.
        """
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

    @torch.no_grad()
    def after_attention(self, queries: torch.Tensor, scaling: float) -> None:
        """Compress a staged prompt; while decoding, evict when it is time. `queries`: (batch, heads, new, head_dim)."""
        if self.staged is not None:
            self._compress(queries, scaling)
        elif self.policy.decode is not None:
            self._remember(queries)
            if self.decoded >= self.policy.decode_interval:
                self._evict(scaling)

    # -- compression

    def _compress(self, queries: torch.Tensor, scaling: float) -> None:
        """Store what the cluster keeps of the staged prompt."""
        (keys, values), chunk = self.staged, self.chunk
        self.staged = self.chunk = None
        budgets = self._budgets(chunk)
        padding = None if chunk.padding is None else chunk.padding.to(keys.device)
        if budgets == chunk.context and self._is_whole:
            # Nothing to drop: pads stay too, so that every shape is that of transformers' own cache.
            pads = None if padding is None else pad_columns(padding, chunk.columns)[:, 0]
            self._store_whole(keys, values, pads)
            kept = torch.tensor(chunk.lengths, device=keys.device, dtype=torch.float32)
        else:
            vision = None if chunk.vision is None else chunk.vision.to(keys.device)
            text = None
            if self.policy.engine.ratio_of == "vision":
                text = tuple(n - images for n, images in zip(chunk.context, chunk.vision_lengths, strict=True))
            prompt = Prompt(
                layer_idx=self.layer_idx,
                num_layers=self.num_layers,
                lengths=chunk.lengths,
                budgets=budgets,
                scaling=scaling,
                padding=padding,
                vision=vision,
                protected=None if text is None else ~vision,
                protected_lengths=text or (),
                row_seeds=chunk.row_seeds,
                head_budget=self.policy.head_budget,
                safeguard=self.policy.engine.safeguard,
            )
            if chunk.context == chunk.lengths:
                result = self._update_kv(queries, keys, values, prompt)
                uniform = padding is None and prompt.head_budget == "uniform" and len(set(budgets)) == 1
            else:
                result = self._update_context(queries, keys, values, prompt, chunk.context)
                uniform = False
            kept = (result.indices >= 0).sum(2).float().mean(1)
            first = self.seen - chunk.columns
            result = replace(result, indices=torch.where(result.indices < 0, -1, result.indices + first))
            self._store(result, first, uniform)
        self.prompt_kept = kept if self.prompt_kept is None else self.prompt_kept + kept
        before = self.prompt_lengths or [0] * len(budgets)
        self.prompt_lengths = [a + b for a, b in zip(before, chunk.lengths, strict=True)]
        self.prompt_columns += chunk.columns
        self.row_seeds = chunk.row_seeds
        self.decoded, self.recent_queries = 0, []
        if self.policy.decode is not None:
            self._remember(queries)

    def _budgets(self, chunk: Chunk) -> list[int]:
        """Entries to keep of each row's context, per KV head."""
        if self.policy.engine.ratio_of == "prompt":
            return [self.policy.budget(length) if length else 0 for length in chunk.context]
        return [
            length - images + (self.policy.budget(images) if images else 0)
            for length, images in zip(chunk.context, chunk.vision_lengths, strict=True)
        ]

    def _update_context(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt, context: list[int]
    ) -> Kept:
        """Compress each row's first `context` real tokens as if they were the whole prompt, and keep the rest."""
        columns = keys.shape[2]
        pads = torch.tensor([columns - length for length in prompt.lengths], device=keys.device)
        length = torch.tensor(context, device=keys.device)
        width = max(context)
        part = []
        if width:
            # Rows end their context at different columns: shift each so that all are aligned to the right.
            empty = width - length
            source = (pads - empty)[:, None] + torch.arange(width, device=keys.device)
            padding = empty[:, None] if min(context) < width else None
            source_rows = source.clamp(min=0)
            taken = [_columns_of(states, source_rows) for states in (queries, keys, values)]
            masks = {
                name: None if mask is None else mask.gather(1, source_rows)
                for name, mask in (("vision", prompt.vision), ("protected", prompt.protected))
            }
            inner = replace(prompt, lengths=context, padding=padding, **masks)
            result = self._update_kv(*taken, inner)
            indices = source_rows[:, None].expand(-1, keys.shape[1], -1).gather(2, result.indices.clamp(min=0))
            part.append(replace(result, indices=indices.masked_fill(result.indices < 0, -1)))
        rest = torch.arange(min(context), columns, device=keys.device)  # columns of every row's question, and more
        is_question = (rest >= (pads + length)[:, None])[:, None].expand(-1, keys.shape[1], -1)
        part.append(Kept(keys[:, :, rest], values[:, :, rest], torch.where(is_question, rest, -1)))
        return right_aligned(joined(part))

    def _update_kv(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> Kept:
        # A layer's share is one of what can be evicted at all.
        fixed = prompt.protected_lengths or (0,) * len(prompt.lengths)
        share = replace(
            prompt,
            lengths=[length - n for length, n in zip(prompt.lengths, fixed, strict=True)],
            budgets=[budget - n for budget, n in zip(prompt.budgets, fixed, strict=True)],
        )
        budgets = [n + more for n, more in zip(fixed, self.policy.cluster.layer_budgets(share), strict=True)]
        return self.policy.cluster.update_kv(queries, keys, values, replace(prompt, budgets=budgets))

    def _evict(self, scaling: float) -> None:
        """Bring the stored entries, decoded ones included, back to the decode budget."""
        kept = self.storage.kept(self.seen)
        used = kept.indices >= 0
        entries = used.sum(-1).amax(1).tolist()
        answer = self.seen - self.prompt_columns
        tokens = [length + answer for length in self.prompt_lengths]  # of each row, evicted ones included
        prompt = Prompt(
            layer_idx=self.layer_idx,
            num_layers=self.num_layers,
            lengths=tokens,
            budgets=[self.policy.decode(n) for n in tokens],
            scaling=scaling,
            padding=(~used).sum(-1),
            row_seeds=self.row_seeds,
            head_budget=self.policy.head_budget,
            safeguard=self.policy.engine.safeguard,
            columns=kept.indices,
            seen=self.seen,
            tokens=tuple(tokens),
        )
        # Layers share a row's budget out by its tokens, which are the same for all, not by what each happens to hold.
        shares = self.policy.cluster.layer_budgets(prompt)
        budgets = [min(share, held) for share, held in zip(shares, entries, strict=True)]
        self.decoded = 0
        if budgets == entries:
            return
        queries = torch.cat(self.recent_queries, dim=2) if self.recent_queries else None
        prompt = replace(prompt, lengths=entries, budgets=budgets)
        result = self.policy.cluster.update_kv(queries, kept.keys, kept.values, prompt)
        columns = kept.indices.gather(2, result.indices.clamp(min=0)).masked_fill(result.indices < 0, -1)
        self.storage = self._new_storage(result.keys, result.values, columns, None)

    def _remember(self, queries: torch.Tensor) -> None:
        """Keep the last rotated queries, as many as the cluster scores with."""
        window = self.policy.cluster.query_window
        if not window:
            return
        self.recent_queries.append(queries[:, :, -window:].clone())  # a view would keep all of the prompt's alive
        if len(self.recent_queries) > 2 * window:
            self.recent_queries = [torch.cat(self.recent_queries, dim=2)[:, :, -window:]]

    # -- storage

    @property
    def _is_whole(self) -> bool:
        """Nothing was dropped so far, and another prompt can be put behind it in one piece."""
        if isinstance(self.storage, (DenseStorage, StaticStorage, OffloadedStorage)):
            return self.storage.is_whole
        return self.storage is None

    def _store_whole(self, keys: torch.Tensor, values: torch.Tensor, pads: torch.Tensor | None) -> None:
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
            kept = right_aligned(joined([self.storage.kept(first), kept]))
            uniform = False
        self.storage = self._new_storage(kept.keys, kept.values, kept.indices, None, uniform)

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
        """Bytes of all buffers, spare room and index included."""
        tensors = [] if self.storage is None else self.storage.tensors()
        return sum(tensor.untyped_storage().nbytes() for tensor in [*tensors, *self.recent_queries])
