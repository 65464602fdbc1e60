"""The number of KV entries that a prompt may keep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..errors import KVCompressError


@dataclass(frozen=True)
class Budget:
    """The requested budget: a fraction of the prompt's entries, or a number of entries.

    Attributes:
        ratio: fraction of the prompt's KV entries that is kept, in (0, 1]. (kvpress's `compression_ratio` is the
            fraction that is dropped.)
        entries: entries kept per layer and KV head, instead of `ratio`.
        on_top: number of first tokens that are kept in addition and that `ratio` does not count.
    """

    ratio: float | None = None
    entries: int | None = None
    on_top: int = 0

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
        """Return the entries kept of `length`: `ratio * length` rounded half up, between 1 and `length`.

        The ratio applies to the length without the `on_top` tokens, which are added."""
        if self.ratio is None:
            return min(self.entries, length)
        on_top = min(self.on_top, length)
        return min(max(on_top + math.floor(self.ratio * (length - on_top) + 0.5), 1), length)


def effivlm_window(budget: int) -> int:
    """Return the recent tokens that EffiVLM-Bench's methods keep: a tenth of the budget, and at least one."""
    return max(1, int(0.1 * budget))


def allocate(weights: Sequence[float], total: int, most: int) -> list[int]:
    """Return integers in proportion to the weights that sum to exactly `total`.

    Each is at most `most` and, if the total allows, at least 1. The excess of capped ones goes to the others. What
    rounding leaves over goes by largest remainder, to the earlier one among equals."""
    count = len(weights)
    if not 0 <= total <= count * most:
        raise ValueError(f"{total} cannot be shared out over {count} parts of at most {most}")
    least = 1 if total >= count else 0
    top = max(weights)
    positive = [max(weight / top, 1e-9) if top > 0 else 1.0 for weight in weights]

    def shares(scale: float) -> list[float]:
        return [min(max(scale * weight, least), most) for weight in positive]

    low, high = 0.0, (most + 1) / min(positive)
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):  # there is no number in between
            break
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    wanted = shares(high)
    parts = [math.floor(share + 1e-9) for share in wanted]
    order = sorted(range(count), key=lambda i: (parts[i] - wanted[i], i))  # largest remainder first
    over = sum(parts) - total
    for i in reversed(order):  # only if rounding noise lifted a share to the next integer
        if over > 0 and parts[i] > least:
            parts[i], over = parts[i] - 1, over - 1
    for i in order:
        if over < 0 and parts[i] < most:
            parts[i], over = parts[i] + 1, over + 1
    return parts


@lru_cache(maxsize=1024)
def allocated(weights: tuple[float, ...], total: int, most: int) -> tuple[int, ...]:
    """Return `allocate`, computed once for all layers: each asks for its own part, while decoding at every step."""
    return tuple(allocate(weights, total, most))


def pyramid(budget: int, length: int, num_layers: int, beta: float, least: int) -> list[int]:
    """Return budgets that fall linearly from the first layer to the last (`pyramid_ends`) and sum to exactly
    `budget * num_layers`."""
    first, last = pyramid_ends(budget, length, num_layers, beta, least)
    # Rounding the running total, not each term, makes the sum exact.
    totals = [0.0]
    for layer in range(num_layers):
        totals.append(totals[-1] + first - layer * (first - last) / max(num_layers - 1, 1))
    ends = [math.floor(total + 0.5) for total in totals]
    return [end - begin for begin, end in pairwise(ends)]


def pyramid_ends(budget: int, length: int, num_layers: int, beta: float, least: int) -> tuple[float, float]:
    """Return the unrounded budgets of the first and the last layer.

    PyramidKV (https://arxiv.org/abs/2406.02069, section 3.3): the last layer gets `budget / beta`, and the first
    exceeds the mean by as much as the last falls short of it. If that is more than `length`, the first gets `length`.
    If the last layer would get fewer than `least` (a window), all layers get the same.
    """
    last = budget / beta
    first = 2 * budget - last
    if first > length:
        first, last = length, 2 * budget - length
    return (budget, budget) if last < least or num_layers == 1 else (first, last)
