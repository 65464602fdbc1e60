"""The entries that a cache kept, and those that it should have kept."""

import math

import kvcompress


def kept_of(cache: kvcompress.CompressedCache) -> list:
    return [cache.kept_indices(layer) for layer in range(len(cache.layers))]


def real_lengths(inputs: dict) -> list[int]:
    return inputs["attention_mask"].sum(1).tolist()


def expected_entries(ratio: float, length: int, on_top: int = 0) -> int:
    on_top = min(on_top, length)
    return max(1, on_top + math.floor(ratio * (length - on_top) + 0.5))
