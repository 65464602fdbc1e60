"""How many KV entries a prompt may keep."""

import math
from dataclasses import dataclass

from .errors import KVCompressError


@dataclass(frozen=True)
class Budget:
    """What the user asked for: a fraction of the prompt's entries, or a number of entries.

    Attributes:
        ratio: fraction of the prompt's KV entries that is kept, in (0, 1]. (kvpress's `compression_ratio` is the
            fraction that is dropped.)
        entries: entries kept per layer and KV head; in place of `ratio`.
    """

    ratio: float | None = None
    entries: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.entries is None):
            raise KVCompressError(
                f"give either ratio= or budget=, not both and not none (ratio={self.ratio}, budget={self.entries})"
            )
        if self.ratio is not None:
            number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
            if not number or not 0 < self.ratio <= 1:
                raise KVCompressError(f"ratio={self.ratio!r} is not in (0, 1]: it is the fraction that is kept")
        elif not isinstance(self.entries, int) or isinstance(self.entries, bool) or self.entries < 1:
            raise KVCompressError(f"budget={self.entries!r} is not an integer of at least 1: it counts entries kept")

    def __call__(self, length: int) -> int:
        """Entries kept of `length`: `ratio * length` rounded half up, at least 1 and at most `length`."""
        wanted = self.entries if self.ratio is None else math.floor(self.ratio * length + 0.5)
        return min(max(wanted, 1), length)
