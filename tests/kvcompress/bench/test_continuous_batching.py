"""Requests through transformers' continuous batching, at equal memory for keys and values."""

import pytest
import torch

from kvcompress.bench.continuous_batching import page_bytes, serve
from kvcompress.errors import KVCompressError
from tests.support.families import FAMILIES

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

PROMPTS = torch.randint(8, 128, (5, 12), generator=torch.Generator().manual_seed(0)).tolist()
NEW = [20, 3, 20, 11, 20]


def test_fewer_steps_in_the_same_pages():
    model = FAMILIES["qwen2"].build(2)
    kv_bytes = 9 * page_bytes(model, 4)
    full = serve(model, PROMPTS, NEW, kv_bytes, page_size=4, batch_tokens=64)
    bounded = serve(model, PROMPTS, NEW, kv_bytes, 4, 64, "keydiff", budget=8, decode_budget=8, decode_interval=4)
    for served in (full, bounded):
        assert [len(tokens) for tokens in served.tokens] == NEW
        assert served.kv_bytes == kv_bytes
        assert served.tokens_per_second == sum(NEW) / served.seconds
    assert bounded.steps < full.steps


def test_entries_for_all_tokens_change_none():
    model = FAMILIES["qwen2"].build(2)
    full = serve(model, PROMPTS, NEW, 2_000_000, batch_tokens=64)
    assert serve(model, PROMPTS, NEW, 2_000_000, 16, 64, "keydiff", budget=32, decode_budget=32).tokens == full.tokens


def test_a_request_that_cannot_be_answered_is_said():
    model = FAMILIES["qwen2"].build(2)
    with pytest.raises(KVCompressError, match="request req_0 failed: No requests can be scheduled"):
        serve(model, PROMPTS[:1], [100], 2 * page_bytes(model, 4), page_size=4, batch_tokens=64)
