"""A clock that can be stopped during work that is nobody's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """The seconds since some time, without those while it was stopped."""

    def __init__(self) -> None:
        self._stopped_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self._stopped_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stopped_s += time.perf_counter() - start
