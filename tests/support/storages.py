"""The ways to store entries, and answers from them beside those from dense and ragged entries in full precision."""

import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES
from tests.support.kept import kept_lists

ROOM = 64  # tokens, where a storage has fixed shapes
STORAGES = {
    "static": {"cache_implementation": "static", "max_new_tokens": ROOM},
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded static": {"cache_implementation": "offloaded_static", "max_new_tokens": ROOM},
    "think": {"cache_implementation": "think", "key_recent": 3},
    "quanto": {"cache_implementation": "quantized", "kv_residual": 4},
    "hqq": {
        "cache_implementation": "quantized", "kv_backend": "hqq", "kv_bits": 8, "kv_group_size": 16, "kv_residual": 4,
    },
    "turboquant": {"cache_implementation": "quantized", "kv_backend": "turboquant", "kv_bits": 3},
    "fp8": {"cache_implementation": "quantized", "kv_backend": "fp8"},
}  # fmt: skip
# Those that hold the very numbers, where `think` keeps all channels.
EXACT = {name: STORAGES[name] for name in ("static", "offloaded", "offloaded static", "think")}
EXACT["think"] = EXACT["think"] | {"key_channels": 1.0}


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
