"""Compressed requests in transformers' pages: their state, and subclasses of three of its classes.

transformers uses one number for a request's position and for its entries in the pages, and looks up a request's pages
by it. Here a request's entries are counted separately; the scheduler stays transformers'."""

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

import torch
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type as group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    CacheAllocator,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler
from transformers.generation.continuous_batching.utils import stream_context

from ..cache.memory import Memory
from ..cache.new_tokens import NewTokens
from ..cache_name import MODULES_STORE
from ..scoring.rotary import Rotary

# The functions overridden or called here, with the parameters that they must have.
CONTRACT = {
    FullAttentionCacheAllocator._compute_blocks_needed: ("self", "allocated_blocks", "past_length", "query_length"),
    FullAttentionCacheAllocator.allocate_cache_to_request: ("self", "request_id", "past_length", "query_length"),
    FullAttentionCacheAllocator.fork_blocks: ("self", "source_request_id", "dest_request_id", "past_length"),
    FullAttentionCacheAllocator.free_blocks: ("self", "request_id", "no_cache"),
    FullAttentionCacheAllocator.get_read_indices: ("self", "request_id", "past_length", "query_length"),
    FullAttentionCacheAllocator.get_seqlen_k: ("self", "past_length", "query_length"),
    FullAttentionCacheAllocator.get_write_indices: ("self", "request_id", "past_length", "query_length"),
    FullAttentionCacheAllocator.needs_new_blocks: ("self", "request_id", "past_length", "query_length"),
    PagedAttentionCache.can_store_request_tokens: ("self", "state", "request_len", "dry_run"),
    PagedAttentionCache.count_new_complete_blocks: ("self", "state", "request_len"),
    PagedAttentionCache.search_prefix_match: ("self", "request_id", "prompt_ids"),
    ContinuousBatchingIOs.prepare_batch_tensors: (
        *("self", "requests_in_batch", "logits_processors", "use_decode_fast_path", "num_q_tokens", "max_kv_read"),
        "use_padding",
    ),
}
ENDLESS = 2**31


@dataclass
class LayerState:
    """A request's state in one layer.

    Attributes:
        memory: what later choices need; the entries themselves are in the pages.
        columns: LongTensor (kv_heads, entries), each entry's column in the sequence, at the latest choice.
        queries: queries of the prompt's chunks so far, each (1, heads, tokens, head_dim).
    """

    memory: Memory
    columns: torch.Tensor | None = None
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class PagedRequest:
    """The state of one request between two forward passes, apart from its pages.

    Attributes:
        prompt: its token ids.
        most: the most entries that it may hold at once after its prompt, in each layer and head.
        layers: the state in each compressed layer, in order.
        stored: number of entries in the pages.
        is_reading: whether chunks of the prompt are missing; until then the prompt is kept whole.
        decoded: tokens since the latest eviction.
        tokens: facts about the prompt, after its last chunk.
        rotary: the rotation of the prompt's chunks so far, if the method needs it; after the last one, of all, until
            each layer has read it.
        known_rotation: that of a prefix that other requests have computed, before the first chunk is read.
        states: for a prefix cache, queries, keys and values of the whole prompt in each layer so far,
            (heads, tokens, head_dim).
    """

    prompt: list[int]
    most: int
    layers: list[LayerState]
    stored: int = 0
    is_reading: bool = True
    decoded: int = 0
    tokens: NewTokens | None = None
    rotary: list[Rotary] = field(default_factory=list)
    known_rotation: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        """The most entries that it may still hold at once."""
        return max(self.most, len(self.prompt)) if self.is_reading else self.most

    def fork(self) -> "PagedRequest":
        """Return a copy for a request that continues from the same prompt before its last chunk."""
        twin = copy.copy(self)
        twin.layers = [LayerState(layer.memory.fork(), None, list(layer.queries)) for layer in self.layers]
        twin.rotary, twin.states = list(self.rotary), list(self.states)
        return twin


class Compressor(Protocol):
    """Compresses the entries in the pages."""

    adopted: "weakref.ref[CompressedPagedCache]"  # a manager that stops frees its pages, whoever knows the compressor
    shares_prefixes: bool  # whether `resume` is to be called

    def register(self, state: RequestState) -> PagedRequest:
        """Return the request that is about to get its first pages."""

    def resume(self, state: RequestState) -> int:
        """Start a waiting request after a prefix whose entries are known, if its pages are free. Return its length."""

    def plan(self, batch: list[FutureRequestState]) -> None:
        """Plan the forward pass over `batch`, whose tokens already have their places in the pages."""


def blocks_in_use(pages: CacheAllocator) -> int:
    """Return the blocks that requests have, each of one page per layer. Any thread may ask."""
    return sum(map(len, list(pages.block_table.values())))


class CompressedPages(FullAttentionCacheAllocator):
    """The allocator of all full-attention layers.

    Attributes:
        requests: by request id, from a request's first pages until it is freed.
    """

    requests: dict[str, PagedRequest]
    _stored: Iterator[int]

    def announce(self, batch: list[FutureRequestState]) -> None:
        """Set the requests of the next calls of `get_seqlen_k`, which gets no request id: in this order and once
        each."""
        self._stored = iter([self.requests[future.state.request_id].stored for future in batch])

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return next(self._stored) + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, 0, self._entries(request_id, past_length + query_length))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, 0, self._entries(request_id, past_length + query_length))

    def _entries(self, request_id: str, length: int) -> int:
        """Return the number of entries to reserve pages for: the most that a request will hold at once.

        An admitted request then never waits for pages. transformers would restart one that does, with its answer so far
        as part of the prompt."""
        request = self.requests.get(request_id)
        return length if request is None else request.reserved

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_read_indices(request_id, self.requests[request_id].stored, query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_write_indices(request_id, self.requests[request_id].stored, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.requests.pop(request_id, None)

    def free_rest(self, request_id: str) -> None:
        """Free the pages beyond the reserved ones."""
        table = self.block_table[request_id]
        needed = -(-self.requests[request_id].reserved // self.tokens_per_page)
        self.pool.free_blocks(self.index, table[needed:])
        del table[needed:]

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        self.requests[dest_request_id] = self.requests[source_request_id].fork()
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    @property
    def pages_in_use(self) -> int:
        """Pages per layer that requests have."""
        return blocks_in_use(self)


class CompressedPagedCache(PagedAttentionCache):
    """A paged cache that registers each request before its first pages, and gives them out in order of arrival."""

    compressor: Compressor
    pages: CompressedPages
    scheduler: Scheduler
    stream: torch.cuda.Stream | None
    refused: str | None  # the request that waits for pages in this step; later ones wait behind it

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        known = self.pages.requests.get(state.request_id)
        is_new = known is None or known.prompt is not state.initial_tokens  # ids may be reused
        if is_new and state.request_id not in self.pages.block_table:
            self.pages.requests[state.request_id] = self.compressor.register(state)
        # All tokens that may follow: layers with a sliding window reserve pages for them, up to the window.
        answer = ENDLESS if state.max_new_tokens is None else state.max_new_tokens
        to_come = len(state.initial_tokens) + answer - state.current_len()
        is_waiting = state.request_id in self.scheduler.waiting_requests
        if is_waiting and self.refused not in (None, state.request_id):
            return False
        fits = super().can_store_request_tokens(state, max(request_len, to_come), dry_run)
        if is_waiting and not fits:
            self.refused = state.request_id
        return fits

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all requests' pages."""
        return sum(blocks_in_use(each) * each.bytes_per_block for each in self.cache_allocators.values())

    def could_hold(self, entries: int, tokens: int) -> bool:
        """Return whether all pages together hold a request of so many entries in layers with full attention, and of so
        many tokens in the others. transformers' thread would end at one that never fits."""
        lengths = [(each, entries if each is self.pages else tokens) for each in self.cache_allocators.values()]
        sectors = [ceil(each._compute_blocks_needed(0, 0, most) / each.blocks_per_sector) for each, most in lengths]
        return sum(sectors) <= self.num_sectors

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass states on to the attention function, which knows what it reads and calls `store`."""
        if not MODULES_STORE:
            return self.store(key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    store = PagedAttentionCache.update

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        with stream_context(self.stream):
            return self.compressor.resume(self.scheduler.waiting_requests[request_id])

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {}  # no page is shared: its entries are copied


class CompressedIOs(ContinuousBatchingIOs):
    """The inputs of a forward pass."""

    def prepare_batch_tensors(self, requests_in_batch: list[FutureRequestState], **kwargs) -> None:
        # Entries that are read by the type of layer that reads most; the scheduler has not counted them.
        pages, reads = self.cache.pages, []
        self.cache.refused = None  # the step's requests are chosen
        pages.announce(requests_in_batch)
        for allocator in self.cache.cache_allocators.values():
            lengths = [(future.state.position_offset, future.query_length) for future in requests_in_batch]
            reads.append(sum(allocator.get_seqlen_k(past, new) - new for past, new in lengths))
        kwargs["max_kv_read"] = max(reads)
        pages.announce(requests_in_batch)
        super().prepare_batch_tensors(requests_in_batch, **kwargs)
        with stream_context(self.compute_stream):  # the forward pass reads there what is planned
            self.cache.compressor.plan(requests_in_batch)


def adopt(
    cache: PagedAttentionCache, inputs: ContinuousBatchingIOs, scheduler: Scheduler, compressor: Compressor
) -> None:
    """Convert an empty cache and its inputs to the classes for compressed requests."""
    pages = cache.cache_allocators[FULL_ATTENTION]
    pages.__class__, cache.__class__, inputs.__class__ = CompressedPages, CompressedPagedCache, CompressedIOs
    pages.requests, cache.pages, cache.compressor, cache.scheduler = {}, pages, compressor, scheduler
    cache.stream, cache.refused = inputs.compute_stream, None
    compressor.adopted = weakref.ref(cache)
    cache.use_prefix_sharing = compressor.shares_prefixes
    # The scheduler would count tokens as entries that are read, and hold requests back. The entries read are in the
    # requests' own pages, whose number bounds them.
    cache.read_cache_limit = 0
