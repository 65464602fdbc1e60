"""The entries that a cache kept, and those that it should have kept."""

import math

import kvcompress


def kept_of(cache: kvcompress.CompressedCache) -> list:
    return [cache.kept_indices(layer) for layer in range(len(cache.layers))]


def kept_lists(cache: kvcompress.CompressedCache) -> list:
    """Return the kept columns, [layer][row][kv_head], as lists."""
    return [[[head.tolist() for head in row] for row in layer] for layer in kept_of(cache)]


def kept_of_row(cache: kvcompress.CompressedCache, row: int = 0, pads: int = 0) -> list:
    """Return what a row keeps, [layer][kv_head], as columns of its own prompt, in front of which it has `pads`."""
    return [[(head - pads).tolist() for head in layer[row]] for layer in kept_of(cache)]


def real_lengths(inputs: dict) -> list[int]:
    return inputs["attention_mask"].sum(1).tolist()


def expected_entries(ratio: float, length: int, on_top: int = 0) -> int:
    on_top = min(on_top, length)
    return max(1, on_top + math.floor(ratio * (length - on_top) + 0.5))
