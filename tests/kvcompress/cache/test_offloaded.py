"""Entries in the CPU's memory: the same answers. (That the device holds less is checked on a GPU: tests/gpu.)"""

import pytest
import torch

import kvcompress
from kvcompress.cache.storage.offloaded import OffloadedStorage
from kvcompress.check.reference import generate
from tests.support.examples import paired, some
from tests.support.families import FAMILIES
from tests.support.storages import beside_dynamic
from tests.support.strategies import METHODS, SOME_METHODS

MODEL = FAMILIES["qwen2"].build()


@pytest.mark.parametrize(
    ("method", "kind"), some(paired([*METHODS, "full"], ["offloaded", "offloaded_static"]), SOME_METHODS)
)
def test_offloaded_equals_dynamic(kind, method):
    logits, expected, cache = beside_dynamic("qwen2", method, 0.3, max_new_tokens=8, cache_implementation=kind)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert all(isinstance(layer.storage, OffloadedStorage) for layer in cache.layers)


def test_offloaded_entries_are_evicted_while_decoding_and_take_a_second_prompt():
    first, more = torch.arange(10, 50)[None], torch.arange(60, 70)[None]
    logits = []
    for kind in ("dynamic", "offloaded"):
        cache = kvcompress.CompressedCache(
            MODEL.config, "snapkv", 0.5, decode_budget=12, decode_interval=2, cache_implementation=kind
        )
        with kvcompress.attach(MODEL):
            generate(MODEL, {"input_ids": first}, 9, past_key_values=cache)
            logits.append(MODEL(more, past_key_values=cache).logits)
        assert len(cache.kept_indices(0)[0][0]) <= 12 + 2 + 10
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
