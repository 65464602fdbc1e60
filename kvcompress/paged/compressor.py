"""Compression of requests in pages: of a prompt after its last chunk, and of an answer every `decode_interval` tokens.

Kept entries move to the front of a request's pages. Their number depends only on lengths, so the pages are planned
before the forward pass. Each layer chooses the entries right after its attention. With a prefix cache, a request starts
with the entries of a known prefix, and the states of its whole prompt become known once they are read."""

import weakref
from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from ..cache.choice import Choice
from ..cache.eviction import evict_together, note_left
from ..cache.memory import Memory
from ..cache.new_tokens import NewTokens
from ..cache.phases import Prefill
from ..cache.scope import States
from ..device import on_device
from ..errors import KVCompressError
from ..hooks.prefix_cache import RequestPrefixes
from ..policy.policy import Policy
from ..scoring.layer_view import Kept
from ..scoring.rotary import Rotary
from .attention import OwnEntries
from .pages import CompressedPagedCache, CompressedPages, LayerState, PagedRequest


@dataclass
class PromptChunk:
    """A prompt, or a chunk of one.

    Attributes:
        tokens: its tokens in the batch.
        slots: the whole prompt's slots in the pages; None if more chunks follow.
    """

    request: PagedRequest
    tokens: slice
    slots: torch.Tensor | None


@dataclass
class EvictionGroup:
    """Requests that evict in the same step, with equally many entries each.

    Attributes:
        rows: LongTensor (requests, 1), places of their tokens in the batch.
        slots: LongTensor (requests, entries), slots of their entries in the pages.
        seen: tokens of each so far, evicted ones included.
        ends: the same as a LongTensor (requests, 1, 1).
        kept: number of entries that each keeps.
    """

    requests: list[PagedRequest]
    rows: torch.Tensor
    slots: torch.Tensor
    seen: list[int]
    ends: torch.Tensor
    kept: list[int]


@dataclass
class Step:
    """The compression in one forward pass.

    Attributes:
        rows: LongTensor, places of the decoded tokens in the batch.
        own: the entries of their requests, if all tokens of the batch are decoded ones.
    """

    chunks: list[PromptChunk]
    decoding: list[PagedRequest]
    rows: torch.Tensor
    groups: list[EvictionGroup]
    own: OwnEntries | None


class PagedCompressor:
    """Compresses one manager's requests; the pages and the attention function call it.

    Attributes:
        peak_pages: the most pages per layer that requests had at once.
    """

    def __init__(self, policy: Policy, config: PreTrainedConfig, prefixes: RequestPrefixes | None):
        self.policy, self._config, self._prefixes = policy, config, prefixes
        self.shares_prefixes = prefixes is not None
        self.adopted: weakref.ref[CompressedPagedCache] | None = None
        self._rotary: Rotary | None = None
        self._step: Step | None = None
        self.peak_pages = 0

    @property
    def cache(self) -> CompressedPagedCache | None:
        """The manager's cache; None once it is freed."""
        return None if self.adopted is None else self.adopted()

    @property
    def pages(self) -> CompressedPages | None:
        """The pages of its full-attention layers."""
        return None if (cache := self.cache) is None else cache.pages

    # -- for the pages

    def register(self, state: RequestState) -> PagedRequest:
        prompt = state.initial_tokens
        if state.max_new_tokens is None and self.policy.engine.decode_budget is None:
            raise KVCompressError("nothing bounds the pages of a request: give it max_new_tokens=")
        layers = [LayerState(Memory(self.policy, 0)) for _ in self.pages.layer_indices]
        return PagedRequest(prompt, self._most(len(prompt), state.max_new_tokens), layers)

    def _most(self, prompt: int, new: int | None) -> int:
        """Return the most entries of a request after a prompt of so many tokens, in each layer and head."""
        policy = self.policy
        stored = policy.budget(prompt)
        answer = None if new is None else new - 1  # the last token is not fed
        most = None if answer is None else stored + answer
        if policy.decode is not None:
            length = prompt + (answer or 0)
            evicts_at = max(stored, policy.decode(length)) + policy.decode_interval
            most = evicts_at if most is None else min(most, evicts_at)
        return most

    def check_room(self, prompt: int, new: int) -> None:
        """Raise KVCompressError if all pages together cannot hold such a request."""
        if not self.cache.could_hold(max(prompt, self._most(prompt, new)), prompt + new):
            raise KVCompressError(f"a prompt of {prompt} tokens and {new} of its answer need more pages than there are")

    def resume(self, state: RequestState) -> int:
        prompt = state.initial_tokens
        if not self.cache.can_store_request_tokens(state, len(prompt)):
            return 0
        path = self._prefixes.find(prompt)
        known = min(path.tokens, len(prompt) - (2 if state.num_children else 1))  # a fork leaves a token unread, too
        if known <= 0:
            return 0
        request = self.pages.requests[state.request_id]
        slots = self._tensor(self._slots(state.request_id, known))
        for place, (layer, layer_idx) in enumerate(zip(request.layers, self.pages.layer_indices, strict=True)):
            states = (path.computed(3 * place + part, known).to(slots.device) for part in range(3))
            queries, *entries = states
            layer.queries = [queries[None]]
            for pages, part in zip(self.pages._kv_token_views[layer_idx], entries, strict=True):
                pages.index_copy_(0, slots, part.transpose(0, 1))
        rotation = range(3 * len(request.layers), len(path.held[0]))
        request.known_rotation = [path.computed(part, known)[None].to(slots.device) for part in rotation]
        request.stored = known
        self._prefixes.count_reused(known)
        return known

    def plan(self, batch: list[FutureRequestState]) -> None:
        self.peak_pages = max(self.peak_pages, self.pages.pages_in_use)
        chunks, decoding, due, rows, start = [], [], [], [], 0
        read = [self.pages.requests[future.state.request_id].stored + 1 for future in batch]
        for future in batch:
            request_id, stop = future.state.request_id, start + future.query_length
            request = self.pages.requests[request_id]
            if request.is_reading:
                slots = self._slots(request_id, future.query_length) if future.has_new_token else None
                chunks.append(PromptChunk(request, slice(start, stop), None if slots is None else self._tensor(slots)))
            else:
                decoding.append(request)
                rows.append(start)
                request.decoded += 1
                if self.policy.decode is not None and request.decoded >= self.policy.decode_interval:
                    due.append((request, start, self._slots(request_id, 1), future.state.position_offset))
            request.stored += future.query_length
            if request.is_reading and future.has_new_token:
                request.stored, request.is_reading = self.policy.budget(request.stored), False
                self.pages.free_rest(request_id)  # no request gets them before this pass ends
            start = stop
        own = None if chunks else OwnEntries.of(read, self.pages.cache_tensor.device)
        self._step = Step(chunks, decoding, self._tensor(rows), self._grouped(due), own)

    def _slots(self, request_id: str, new: int) -> list[int]:
        return self.pages.get_read_indices(request_id, 0, new)

    def _tensor(self, numbers: list) -> torch.Tensor:
        return on_device(numbers, self.pages.cache_tensor.device, torch.long)

    def _grouped(self, due: list[tuple[PagedRequest, int, list[int], int]]) -> list[EvictionGroup]:
        """Return the requests that are due, in groups of equal shapes, and set their counts to those after the
        eviction."""
        groups = defaultdict(list)
        for request, row, slots, seen in due:
            # By the number of entries and of queries, and by whether anything was evicted before.
            groups[len(slots), min(seen, self.policy.query_window), seen > len(slots)].append(
                (request, row, slots, seen)
            )
        evicting = []
        for group in groups.values():
            requests, rows, slots, seen = (list(part) for part in zip(*group, strict=True))
            kept = [min(self.policy.decode(length), len(slots[0])) for length in seen]
            for request, entries in zip(requests, kept, strict=True):
                request.stored, request.decoded = entries, 0
            ends = self._tensor(seen)[:, None, None]
            evicting.append(EvictionGroup(requests, self._tensor(rows)[:, None], self._tensor(slots), seen, ends, kept))
        return evicting

    def rotate(self, rotary: Rotary) -> None:
        """Set the rotation of the pass's queries, for a method that undoes it."""
        self._rotary = rotary

    # -- for the attention function

    def own_entries(self, module: torch.nn.Module) -> OwnEntries | None:
        """Return `OwnEntries` of the current pass if this layer is compressed and all tokens are decoded ones,
        otherwise None."""
        return self._step.own if module.layer_idx in self.pages.layer_indices else None

    def after_attention(self, module: torch.nn.Module, queries: torch.Tensor, scaling: float) -> None:
        """Compress a layer after its attention with the queries of all requests, (1, heads, tokens, head_dim)."""
        if module.layer_idx not in self.pages.layer_indices:
            return
        place = self.pages.layer_indices.index(module.layer_idx)
        choice = Choice(self.policy, module.layer_idx, place, len(self.pages.layer_indices))
        for chunk in self._step.chunks:
            self._read(chunk, choice, queries, scaling, module)
        if self._step.decoding and self.policy.decode is not None and self.policy.query_window:
            rows = self._step.rows
            latest = choice.latest(queries[0, :, rows].transpose(0, 1).unsqueeze(2), self._rotary_at(rows[:, None]))
            for request, query in zip(self._step.decoding, latest.split(1), strict=True):
                request.layers[place].memory.remember(query)
        for group in self._step.groups:
            self._evict(group, choice, scaling, module)

    def _read(
        self, chunk: PromptChunk, choice: Choice, queries: torch.Tensor, scaling: float, module: torch.nn.Module
    ) -> None:
        """Compress a prompt after its last chunk; store the queries of an earlier chunk."""
        request, layer = chunk.request, chunk.request.layers[choice.place]
        if self._rotary is not None and choice.place == 0:
            tokens = torch.arange(chunk.tokens.start, chunk.tokens.stop, device=queries.device)
            rotary = self._rotary_at(tokens[None])
            if known := request.known_rotation:
                request.rotary.append(rotary.of_columns(known))
                request.known_rotation = []
            request.rotary.append(rotary)
            if chunk.slots is not None:
                request.rotary = [self._joined(request.rotary)]
        if self.policy.query_window or self.policy.needs_sums or self._prefixes is not None:
            own = queries[:, :, chunk.tokens]  # a view, which would keep all requests' queries alive
            layer.queries.append(own.clone() if chunk.slots is None else own)
        if chunk.slots is None:
            return
        if request.tokens is None:
            ids = torch.tensor([request.prompt])
            request.tokens = NewTokens.of(self._config, self.policy, True, 1, len(request.prompt), ids, None)
        keys, values = self._read_pages(choice, chunk.slots[None])
        asked, layer.queries = torch.cat(layer.queries, dim=2) if layer.queries else None, []
        if self._prefixes is not None:
            request.states += [asked[0], keys[0], values[0]]
            if choice.place == len(request.layers) - 1:
                self._remember(request)
        rotary = request.rotary[0] if request.rotary else None
        if choice.place == len(request.layers) - 1:
            request.rotary = []
        states = States(asked, scaling, module, rotary, keys, values)
        Prefill(choice, layer.memory, request.tokens, None).after_attention(states)
        kept = layer.memory.kept()
        layer.memory.storage = None
        if kept.indices.shape[2] < len(chunk.slots):
            self._put(choice, chunk.slots[None], kept, [request.stored])
        layer.columns = kept.indices[0]

    def _remember(self, request: PagedRequest) -> None:
        """Add a prompt to the prefix cache, for other requests."""
        rotation = [part[0] for rotary in request.rotary for part in rotary.per_column()]
        self._prefixes.add(request.prompt, request.states + rotation)
        request.states = []

    def _evict(self, group: EvictionGroup, choice: Choice, scaling: float, module: torch.nn.Module) -> None:
        """Reduce the requests' entries to the decode budget, as `Decoding` does."""
        layers = [request.layers[choice.place] for request in group.requests]
        memories = [layer.memory for layer in layers]
        keys, values = self._read_pages(choice, group.slots)
        before = torch.stack([layer.columns for layer in layers])
        new = group.ends + torch.arange(before.shape[2] - keys.shape[2], 0, device=keys.device)
        sums = queries = None
        if self.policy.carries_sums:
            sums = torch.nn.functional.pad(torch.cat([memory.sums for memory in memories]), (0, new.shape[2]))
        held = Kept(keys, values, torch.cat([before, new.expand(*before.shape[:2], -1)], dim=2), sums)
        if window := self.policy.query_window:
            queries = torch.cat([torch.cat(memory.latest_queries, dim=2)[:, :, -window:] for memory in memories])
        states = States(queries, scaling, module, self._rotary_at(group.rows))
        left = evict_together(choice, memories, group.seen, held, states, self.policy.decode_interval)
        if left.indices is not held.indices:
            self._put(choice, group.slots, left, group.kept)
        note_left(memories, held, left)
        for row, (layer, entries) in enumerate(zip(layers, group.kept, strict=True)):
            layer.columns = left.indices[row, :, -entries:]
            layer.memory.sums = None if left.sums is None else left.sums[row : row + 1, :, -entries:]

    # -- the pages of a layer

    def _read_pages(self, choice: Choice, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (requests, kv_heads, entries, head_dim) at `slots` (requests, entries)."""
        keys, values = self.pages._kv_token_views[choice.layer_idx]
        return keys[slots].transpose(1, 2), values[slots].transpose(1, 2)

    def _put(self, choice: Choice, slots: torch.Tensor, kept: Kept, entries: list[int]) -> None:
        """Write the kept entries of each request, `entries` of them, to its first slots."""
        wanted = on_device(entries, slots.device)[:, None]
        if not ((kept.indices >= 0).sum(-1) == wanted).all():
            raise KVCompressError(
                f"method {self.policy.method!r} keeps different numbers of entries in its KV heads, which "
                "pages cannot hold"
            )
        for states, pages in zip((kept.keys, kept.values), self.pages._kv_token_views[choice.layer_idx], strict=True):
            if len(set(entries)) == 1:
                most = entries[0]
                pages.index_copy_(0, slots[:, :most].flatten(), states[:, :, -most:].transpose(1, 2).flatten(0, 1))
            else:
                for row, most in enumerate(entries):
                    pages.index_copy_(0, slots[row, :most], states[row, :, -most:].transpose(0, 1))

    # -- rotary embeddings

    def _rotary_at(self, tokens: torch.Tensor) -> Rotary | None:
        """Return the rotary embedding of these tokens of the batch, LongTensor (rows, columns)."""
        if self._rotary is None:
            return None
        return self._rotary.of_columns([part[0, tokens] for part in self._rotary.per_column()])

    @staticmethod
    def _joined(chunks: list[Rotary]) -> Rotary:
        parts = zip(*(chunk.per_column() for chunk in chunks), strict=True)
        return chunks[0].of_columns([torch.cat(part, 1) for part in parts])
