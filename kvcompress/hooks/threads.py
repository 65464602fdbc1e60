"""Which threads are in a forward pass of one model, and with which cache in `generate`."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..cache.cache import CompressedCache
from ..errors import KVCompressError


class Threads:
    """The threads in a forward pass, only one of which at a time may have hooks on the model for its own pass."""

    def __init__(self):
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self._alone: int | None = None  # the thread whose pass needs hooks of its own
        self._answer = threading.local()  # its `caches`: none or the cache of the `generate` that the thread is in

    def has_this(self) -> bool:
        """Whether the current thread is in a forward pass."""
        return threading.get_ident() in self._inside

    def enter(self, is_alone: bool) -> None:
        """Register this thread's forward pass.

        Raises KVCompressError if other threads are in a pass and one of them needs hooks on the model, which would
        affect all."""
        thread = threading.get_ident()
        with self._lock:
            if self._alone not in (None, thread) or (is_alone and self._inside - {thread}):
                raise KVCompressError(
                    "two threads are in a forward pass of this model, and one of them changes the model during its "
                    "pass, as token methods, prefill_chunk= and methods that undo rotations or read twice do: take "
                    "turns"
                )
            self._inside.add(thread)
            if is_alone:
                self._alone = thread

    def leave(self, end_pass: Callable[[], None]) -> None:
        """End this thread's forward pass, if `enter` registered one; `end_pass` removes the hooks of its own."""
        thread = threading.get_ident()
        with self._lock:
            self._inside.discard(thread)
            if self._alone == thread:
                end_pass()
                self._alone = None

    def generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `generate`, whose cache is the first that the thread passes to `answers_cache`."""
        outer = getattr(self._answer, "caches", None)
        self._answer.caches = []
        try:
            return generate(*args, **kwargs)
        finally:
            self._answer.caches = outer

    def answers_cache(self, cache: CompressedCache) -> CompressedCache:
        """Return the cache of the `generate` that this thread is in; outside of one, the given one of a pass.

        They differ where a logits processor calls the model, as that of `guidance_scale=` does."""
        if torch.compiler.is_compiling() or (caches := getattr(self._answer, "caches", None)) is None:
            return cache
        if not caches:
            caches.append(cache)
        return caches[0]
