"""Prepare batches in a background thread while the model answers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")


@contextmanager
def ahead(function: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Iterator[Result]]:
    """Compute `map(function, items)` in one background thread, at most `depth` results ahead of the consumer.

    Results and exceptions come in the order of `map`. Leaving the context waits for the running call and starts no
    other. A depth of 0 is `map` itself.
    """
    if depth == 0:
        yield map(function, items)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="look-ahead") as thread:
        try:
            yield _in_order(thread, function, iter(items), depth)
        finally:
            thread.shutdown(cancel_futures=True)


def _in_order(
    thread: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterator[Item], depth: int
) -> Iterator[Result]:
    waiting = deque(thread.submit(function, item) for item in islice(items, depth))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(thread.submit(function, item) for item in islice(items, 1))
        yield result
