"""Decoding over ragged entries: right on every path, nothing of the cache's size allocated, bytes as they are held."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvcompress
from benchmarks.ragged_decode import ragged_case as benchmark_case
from benchmarks.ragged_decode import ways_to_attend
from kvcompress.cache.storage.ragged import RaggedStorage
from kvcompress.kernels.ragged_decode import decode_by_segment, decode_gathered, ragged_decode, ragged_decode_reference
from tests.support.answers import attending_by
from tests.support.examples import examples
from tests.support.families import FAMILIES
from tests.support.ragged_cases import TOLERANCE, ragged_case

MODEL = FAMILIES["qwen2"].build()


@examples(60)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 4),
    groups=st.integers(1, 9),
    head_dim=st.sampled_from([16, 33, 80, 128]),
    most=st.sampled_from([1, 5, 200]),
    spare=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_the_ways_on_a_cpu_equal_the_reference(batch, kv_heads, groups, head_dim, most, spare, dtype, seed):
    case = ragged_case(batch, kv_heads, groups, head_dim, most, spare, dtype, seed)
    query, keys, values, starts, lengths, sizes = case
    scaling = head_dim**-0.5
    expected = ragged_decode_reference(query, keys, values, starts, lengths, scaling)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    output = ragged_decode(query, keys, values, starts, lengths, max(sizes[::2]), lambda: sizes, scaling)
    torch.testing.assert_close(output, expected, **close)
    torch.testing.assert_close(decode_by_segment(query, keys, values, sizes, scaling), expected, **close)
    # A copy reads the first spare row where a segment has none of its own: only rows in use are gathered.
    gathered = decode_gathered(query, keys, values, starts, lengths, max(sizes[::2]), scaling)
    torch.testing.assert_close(gathered, expected, **close)


def test_the_benchmark_compares_ways_that_agree():
    case = benchmark_case(2, 6, 2, 64, 100, device="cpu", dtype=torch.float32)
    arguments = [case[name] for name in ("query", "keys", "values", "starts", "lengths")]
    expected = ragged_decode_reference(*arguments, 0.125)
    ways = ways_to_attend(case)
    assert set(ways) == {"uniform", "gathered", "by segment"}
    for name in ("gathered", "by segment"):
        torch.testing.assert_close(ways[name](), expected, atol=1e-5, rtol=1e-5)
    assert ways["uniform"]().shape == expected.shape


class LargestAllocation(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation made, views and writes in place aside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.fixture
def ragged_cache() -> kvcompress.CompressedCache:
    """A prompt of 600 tokens and one of 400, of which half is kept: room for 20 tokens."""
    with kvcompress.compress(MODEL, "snapkv", 0.5, max_new_tokens=20) as session:
        MODEL(**FAMILIES["qwen2"].inputs(MODEL, [600, 400]))
    assert all(isinstance(layer.storage, RaggedStorage) for layer in session.cache.layers)
    return session.cache


@torch.no_grad()
def test_a_decode_step_over_ragged_entries_allocates_nothing_of_their_size(ragged_cache):
    with kvcompress.attach(MODEL), LargestAllocation() as mode:
        for _ in range(20):
            MODEL(torch.tensor([[5], [6]]), past_key_values=ragged_cache)
    assert mode.elements < 200 * 16  # the keys of one head of the shorter row


def test_bytes_held_are_the_entries_the_spare_rows_and_the_index(ragged_cache):
    entries, segments, fp32, int32, int64 = 2 * (300 + 200), 4, 4, 4, 8
    rows = entries + segments * 20
    index = entries * int32 + 2 * segments * int64
    assert ragged_cache.nbytes == 3 * (2 * rows * 16 * fp32 + index)


@torch.no_grad()
def test_weights_asked_for_from_eager_are_those_over_the_kept_entries(ragged_cache):
    with attending_by(MODEL, "eager"), kvcompress.attach(MODEL):
        output = MODEL(torch.tensor([[5], [6]]), past_key_values=ragged_cache, output_attentions=True)
    assert len(output.attentions) == 3
    for weights in output.attentions:
        assert weights.shape == (2, 4, 1, 301)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))
        assert (weights[1, ..., :100] == 0).all()


@torch.no_grad()
def test_rows_selected_again_attend_to_their_own_entries(ragged_cache):
    token = torch.tensor([[5], [6]])
    with kvcompress.attach(MODEL), ragged_cache.reuse():
        expected = MODEL(token, past_key_values=ragged_cache).logits
    ragged_cache.reorder_cache(torch.tensor([1, 0, 1]))
    with kvcompress.attach(MODEL):
        logits = MODEL(token[[1, 0, 1]], past_key_values=ragged_cache).logits
    torch.testing.assert_close(logits, expected[[1, 0, 1]], atol=1e-4, rtol=0)
