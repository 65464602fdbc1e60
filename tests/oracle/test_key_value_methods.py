"""compactor and its parts against plain references, written from their papers in float64, row by row, with loops, and
what recordings do not show of lagkv, criticalkv and expected-attention: ties, errors and padding."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.clusters.leverage import gaussian
from kvcompress.scoring.layer_view import StoredEntries
from kvcompress.scoring.rotary import Rotary
from tests.support.examples import examples
from tests.support.plain_reference import SCALING, best, check, layers

plain_test = examples(40)
INFINITE = float("inf")
INV_FREQ = torch.tensor([1.0, 0.3, 0.1, 0.03])


def rotation(position):
    """One position's rotation of (a, b), the halves of a query or key, as complex numbers."""
    turn = torch.exp(1j * INV_FREQ.double() * position)
    return torch.cat(
        [torch.cat([turn.real.diag(), -turn.imag.diag()], 1), torch.cat([turn.imag.diag(), turn.real.diag()], 1)]
    )


def with_rotary(prompt, columns):
    """The prompt's facts where its columns are at the positions of their row's real tokens."""
    positions = torch.arange(columns) - (columns - torch.tensor(prompt.lengths)[:, None])
    angles = (positions[..., None] * INV_FREQ).repeat(1, 1, 2)
    return dataclasses.replace(prompt, rotary=Rotary(angles.cos(), angles.sin(), positions, INV_FREQ))


def leverage(keys, sketch):
    """Of one head's keys (tokens, head_dim), as they were before their rotation."""
    centred = keys - keys.mean(0)
    if sketch < 8:
        centred = centred @ gaussian(8, sketch, seed=3).double()
    gram = sum((torch.outer(x, x) for x in centred), 0.01 * torch.eye(centred.shape[1], dtype=torch.float64))
    return [float(x @ gram.inverse() @ x) for x in centred]


def before_rotation(keys):
    return torch.stack([rotation(position).T @ key for position, key in enumerate(keys)])


def neighbours_votes(q, k, v, chunk):
    """Of one KV head: what each key receives within its chunk, times the value's norm, pooled over three."""
    votes = []
    for begin in range(0, len(k), chunk):
        here = slice(begin, begin + chunk)
        weights = [(k[here] @ query).softmax(0) for head in q for query in head[here]]
        votes += (sum(weights) / len(q)).tolist()
    scores = [0.0, *(vote * float(value.norm()) for vote, value in zip(votes, v, strict=True)), 0.0]
    return [sum(scores[i : i + 3]) / 3 for i in range(len(k))]


@plain_test
@given(layer=layers(), chunk=st.sampled_from([1, 5, 64]))
def test_non_causal_attention_keeps_what_the_chunks_queries_take_most_from(layer, chunk):
    def reference(q, k, v, budget):
        return best(torch.tensor(neighbours_votes(q, k, v, chunk)).float().tolist(), budget)

    check(kvcompress.make_cluster("non-causal-attention", chunk_size=chunk), layer, reference)


@plain_test
@given(
    layer=layers(), sinks=st.sampled_from([0, 3]), recent=st.sampled_from([0, 2]), blending=st.sampled_from([None, 0.5])
)
def test_compactor_adds_both_standardised_over_all_heads(layer, sinks, recent, blending):
    queries, keys, values, prompt = layer
    prompt = with_rotary(prompt, keys.shape[2])
    kv_heads, groups = keys.shape[1], queries.shape[1] // keys.shape[1]
    cluster = kvcompress.make_cluster(
        "compactor", sinks=sinks, recent=recent, chunk_size=5, sketch=3, seed=3, blending=blending
    )
    kept = cluster.update_kv(queries, keys, values, prompt)
    for row, (length, budget) in enumerate(zip(prompt.lengths, prompt.budgets, strict=True)):
        first = keys.shape[2] - length
        inner = slice(sinks, length - recent)
        if length - recent - sinks < 3:
            continue
        parts = []
        for head in range(kv_heads):
            q = queries[row, head * groups : (head + 1) * groups, first:].double()
            k, v = keys[row, head, first:].double(), values[row, head, first:].double()
            parts.append((leverage(before_rotation(k)[inner], 3), neighbours_votes(q[:, inner], k[inner], v[inner], 5)))
        geometry, attention = torch.tensor(parts, dtype=torch.float64).transpose(0, 1)
        share = 1 - budget / length if blending is None else blending
        scores = share * (geometry - geometry.mean()) / geometry.std(correction=0)
        scores += (attention - attention.mean()) / attention.std(correction=0)
        for head in range(kv_heads):
            slots = kept.indices[row, head]
            whole = [INFINITE] * sinks + scores[head].tolist() + [INFINITE] * recent
            assert (slots[slots >= 0] - first).tolist() == sorted(best(whole, budget, sinks))


def test_keys_before_their_rotation_where_it_is_unknown_are_a_clear_error():
    states = torch.ones(1, 1, 5, 4)
    prompt = kvcompress.Prompt(0, 1, [5], [2], SCALING)
    with pytest.raises(kvcompress.KVCompressError, match="scores keys before RoPE"):
        kvcompress.make_cluster("leverage").update_kv(states, states, states, prompt)


def test_criticalkv_without_an_output_projection_is_a_clear_error():
    states = torch.ones(1, 1, 5, 4)
    prompt = kvcompress.Prompt(0, 1, [5], [2], SCALING, module=torch.nn.Identity())
    with pytest.raises(kvcompress.KVCompressError, match="linear, unquantized o_proj, not a Identity with o_proj=None"):
        kvcompress.make_cluster("criticalkv").update_kv(states, states, states, prompt)


def test_expected_attention_while_decoding_counts_the_last_queries_of_each_row():
    """Ten queries are remembered; a row of six tokens has pads among them, and its entries have pads in front."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 2, 10, 4, generator=generator)
    keys, values = (torch.randn(1, 1, 8, 4, generator=generator) for _ in range(2))
    inv_freq = torch.tensor([1.0, 0.3])
    latest = Rotary(torch.ones(1, 1, 4), torch.zeros(1, 1, 4), torch.tensor([[5]]), inv_freq)
    cluster = kvcompress.make_cluster("expected-attention", sinks=2, future=3)

    def score(queries, first, entries):
        columns = torch.arange(first, 8)[None, None] + 4
        prompt = kvcompress.Prompt(
            0, 1, [entries], [3], SCALING, rotary=latest, stored=StoredEntries(columns, 12, (6,))
        )
        prompt = dataclasses.replace(prompt, padding=torch.tensor([[3 - first]]))
        return cluster.score(queries, keys[:, :, first:], values[:, :, first:], prompt)[..., 3 - first :]

    torch.testing.assert_close(score(queries, 0, 5), score(queries[:, :, 4:], 3, 6))


def test_of_equal_tokens_lagkv_keeps_the_later():
    states = torch.ones(1, 1, 300, 4)
    prompt = kvcompress.Prompt(0, 1, [300], [4 + 5 + 46], SCALING)  # 46 tokens are protected beside the sinks
    kept = kvcompress.make_cluster("lagkv", sinks=4, lag=25).update_kv(states, states, states, prompt)
    assert kept.indices[0, 0].tolist() == [0, 1, 2, 3, *[4 + 25 * part + 24 for part in range(5, 10)], *range(254, 300)]
