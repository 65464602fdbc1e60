"""Answers from a storage beside those from dense and ragged entries in full precision."""

import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES
from tests.support.kept import kept_of


def beside_dynamic(
    family: str, method: str, ratio: float, new: int = 8, **storage: object
) -> tuple[torch.Tensor, torch.Tensor, kvcompress.CompressedCache]:
    """Answer two prompts of unequal length without and with the options `storage`, with the same `new` tokens.

    Returns the logits with them, those without, and the cache with them. Raises AssertionError if the two keep other
    entries, or the cache has seen other tokens. `ratio` does not apply to `full`."""
    family, ratio = FAMILIES[family], None if method == "full" else ratio
    model = family.build()
    inputs = family.inputs(model, [45, 29], [1, 0] if family.is_vlm else None)
    options = calibration_of(method, model)
    with kvcompress.compress(model, method, ratio, **options) as session:
        tokens, expected = generate(model, inputs, new)
    kept = kept_lists(session.cache)
    with kvcompress.compress(model, method, ratio, **options, **storage) as session:
        _, logits = generate(model, inputs, new, forced=tokens)
    assert kept_lists(session.cache) == kept
    assert session.cache.seen_tokens == inputs["input_ids"].shape[1] + new - 1
    return logits, expected, session.cache


def kept_lists(cache: kvcompress.CompressedCache) -> list:
    """Return the kept columns, [layer][row][head], as lists."""
    return [[[head.tolist() for head in row] for row in layer] for layer in kept_of(cache)]
