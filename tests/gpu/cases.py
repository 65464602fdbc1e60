"""Models on the device, and what a generation gives there; GPU_TESTS_ON=cpu runs the same on the CPU, fewer of it."""

import copy
import os
from collections.abc import Sequence

import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.families import FAMILIES, MORE_FAMILIES

ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEW = 6
STEPS = [  # whose decode steps wait for the device no more than transformers' own
    ("full", {}),
    ("snapkv", {}),
    ("adakv", {}),
    ("snapkv", {"cache_implementation": "static"}),
    ("adakv", {"cache_implementation": "quantized", "kv_backend": "turboquant", "kv_bits": 4}),
]

Entries = set[tuple[int, int, int, int]]  # layer, row, head, column


def few(cases: Sequence, step: int) -> list:
    """All cases; on the CPU one of `step`."""
    return list(cases)[::step] if ON_CPU else list(cases)


def on(device: torch.device, family: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, dict]:
    """A model of its own, and a padded batch of two rows, of which the first has an image where the model sees."""
    made = (FAMILIES | MORE_FAMILIES)[family]
    model = copy.deepcopy(made.build()).to(device, dtype)
    # Mllama reads an empty image for a row without one, and what attention gives where every key is masked depends on
    # the device.
    images = [1, int(made.image_format == "mllama")] if made.is_vlm else None
    inputs = made.inputs(model, [60, 33], images)
    return model, {name: part.to(dtype) if part.is_floating_point() else part for name, part in inputs.items()}


def answered(
    model: torch.nn.Module, inputs: dict, method: str, ratio: float | None, forced=None, new: int = NEW, **options
) -> tuple[torch.Tensor, torch.Tensor, Entries]:
    """New tokens (batch, new), logits (batch, new, vocabulary), and which entries the cache holds in the end."""
    with kvcompress.compress(model, method, ratio, **options) as session:
        forced = None if forced is None else forced.to(model.device)
        tokens, logits = generate(model, inputs, new, forced)
    return tokens, logits, entries_of(session.cache)


def entries_of(cache: kvcompress.CompressedCache) -> Entries:
    return {
        (layer.layer_idx, row, head, column)
        for layer in cache.compressed_layers
        for row, heads in enumerate(cache.kept_indices(layer.layer_idx))
        for head, columns in enumerate(heads)
        for column in columns.tolist()
    }


def check_as_on_the_cpu(device: torch.device, family: str, method: str, ratio: float | None, **options) -> None:
    """In fp32 the device keeps what the CPU keeps, but for a tie that falls the other way, and says the same."""
    tokens, expected, kept = answered(*on(torch.device("cpu"), family), method, ratio, **options)
    _, logits, ours = answered(*on(device, family), method, ratio, tokens, **options)
    assert len(kept & ours) / max(len(kept), len(ours)) > 0.98
    if kept == ours:
        torch.testing.assert_close(logits.cpu(), expected, atol=1e-3, rtol=0)
