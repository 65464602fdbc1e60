"""transformers' pages, holding what compression leaves of each request: three of its classes, with what differs.

Its continuous batching has one number for a request's position and for its entries in the pages, and asks for a
request's pages by that number. Here a request's entries are counted on their own; the scheduler stays transformers'.
"""

from collections.abc import Iterator
from typing import Protocol

from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type as group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from .request import PagedRequest

# What is overridden here, or called, with the parameters that it must have.
CONTRACT = {
    FullAttentionCacheAllocator.allocate_cache_to_request: ("self", "request_id", "past_length", "query_length"),
    FullAttentionCacheAllocator.fork_blocks: ("self", "source_request_id", "dest_request_id", "past_length"),
    FullAttentionCacheAllocator.free_blocks: ("self", "request_id", "no_cache"),
    FullAttentionCacheAllocator.get_read_indices: ("self", "request_id", "past_length", "query_length"),
    FullAttentionCacheAllocator.get_seqlen_k: ("self", "past_length", "query_length"),
    FullAttentionCacheAllocator.get_write_indices: ("self", "request_id", "past_length", "query_length"),
    FullAttentionCacheAllocator.needs_new_blocks: ("self", "request_id", "past_length", "query_length"),
    PagedAttentionCache.can_store_request_tokens: ("self", "state", "request_len", "dry_run"),
    ContinuousBatchingIOs.prepare_batch_tensors: (
        *("self", "requests_in_batch", "logits_processors", "use_decode_fast_path", "num_q_tokens", "max_kv_read"),
        "use_padding",
    ),
}


class Listener(Protocol):
    """Who compresses what the pages hold."""

    def meet(self, state: RequestState) -> PagedRequest:
        """The request that is about to get its first pages."""

    def plan(self, batch: list[FutureRequestState]) -> None:
        """The forward pass over `batch` is about to begin, and its tokens have their places in the pages."""


class CompressedPages(FullAttentionCacheAllocator):
    """The allocator of all full attention layers.

    Attributes:
        requests: by request id, those that have met the pages and have not left.
    """

    requests: dict[str, PagedRequest]
    _stored: Iterator[int]

    def announce(self, batch: list[FutureRequestState]) -> int:
        """Which requests `get_seqlen_k`, which is not told, will be asked for. Returns the entries they have stored."""
        stored = [self.requests[future.state.request_id].stored for future in batch]
        self._stored = iter(stored)
        return sum(stored)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return next(self._stored) + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, 0, self._entries(request_id, past_length + query_length))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, 0, self._entries(request_id, past_length + query_length))

    def _entries(self, request_id: str, length: int) -> int:
        """Entries that a request of so many tokens must have pages for: all that it will ever hold at once, so that no
        admitted request waits for pages. (transformers restarts one that does, its answer so far as a prompt.)"""
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
        """Give back the pages beyond those that are reserved."""
        table = self.block_table[request_id]
        needed = -(-self.requests[request_id].reserved // self.tokens_per_page)
        self.pool.free_blocks(self.index, table[needed:])
        del table[needed:]

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int):
        self.requests[dest_request_id] = self.requests[source_request_id].fork()
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    @property
    def pages_in_use(self) -> int:
        """Pages per layer that requests have."""
        return sum(len(table) for table in self.block_table.values())


class CompressedPagedCache(PagedAttentionCache):
    """The cache: meets each request before its first pages."""

    listener: Listener
    pages: CompressedPages

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        if state.request_id not in self.pages.requests:
            self.pages.requests[state.request_id] = self.listener.meet(state)
        return super().can_store_request_tokens(state, request_len, dry_run)


class CompressedIOs(ContinuousBatchingIOs):
    """The inputs of a forward pass."""

    def prepare_batch_tensors(self, requests_in_batch: list[FutureRequestState], **kwargs) -> None:
        # What the scheduler counts is tokens, which would hold back requests that read fewer entries.
        kwargs["max_kv_read"] = self.cache.pages.announce(requests_in_batch)
        super().prepare_batch_tensors(requests_in_batch, **kwargs)
        self.cache.listener.plan(requests_in_batch)


def adopt(cache: PagedAttentionCache, inputs: ContinuousBatchingIOs, listener: Listener) -> CompressedPages:
    """Let a cache that is still empty, and the inputs that are made for it, hold compressed requests."""
    pages = cache.cache_allocators[FULL_ATTENTION]
    pages.__class__, cache.__class__, inputs.__class__ = CompressedPages, CompressedPagedCache, CompressedIOs
    pages.requests, cache.pages, cache.listener = {}, pages, listener
    cache.read_cache_limit = 0  # what requests read lies in their own pages, so it is bounded by these
    return pages
