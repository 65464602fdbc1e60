"""Methods against plain references in float64, row by row, with loops; and what holds for the scores of every method.

What other methods keep: tests/oracle/."""

import dataclasses
import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.clusters import criticalkv
from kvcompress.clusters.rkv import redundancy
from kvcompress.layer_budgets import list_layer_budgets
from kvcompress.scoring.layer_view import Settings
from kvcompress.scoring.merging import MERGES
from kvcompress.scoring.rotary import Rotary
from kvcompress.scoring.selection import adaptive_indices
from tests.support.calibrations import calibration_of
from tests.support.examples import examples
from tests.support.families import FAMILIES
from tests.support.plain_reference import SCALING, best, check, layers, snapkv_scores
from tests.support.strategies import METHODS


@examples(60)
@given(layer=layers(), sinks=st.sampled_from([0, 1, 4]))
def test_streamingllm_keeps_first_and_last_tokens(layer, sinks):
    def reference(q, k, v, budget):
        first = min(sinks, budget - 1)
        recent = range(len(k) - (budget - first), len(k))
        return {*range(first), *recent}

    check(kvcompress.make_cluster("streamingllm", sinks=sinks), layer, reference)


@examples(60)
@given(layer=layers())
def test_recent_keeps_the_last_tokens(layer):
    check(kvcompress.make_cluster("recent"), layer, lambda q, k, v, budget: {*range(len(k) - budget, len(k))})


@examples(60)
@given(layer=layers(), variant=st.sampled_from(["code", "kvpress"]))
def test_vnorm_keeps_the_largest_value_norms(layer, variant):
    p = {"code": 1, "kvpress": 2}[variant]
    check(
        kvcompress.make_cluster("vnorm", variant=variant),
        layer,
        lambda q, k, v, budget: best([sum(abs(x) ** p for x in value) for value in v.tolist()], budget),
    )


window_options = {
    "window": st.sampled_from([1, 3, 8, 64]),
    "kernel": st.sampled_from([1, 3, 5]),
    "pooling": st.sampled_from(["avg", "max"]),
}


@examples(60)
@given(layer=layers(), **window_options)
def test_snapkv_keeps_window_and_what_it_attends_to(layer, window, kernel, pooling):
    cluster = kvcompress.make_cluster("snapkv", window_size=window, kernel_size=kernel, pooling=pooling)
    check(cluster, layer, lambda q, k, v, budget: best(snapkv_scores(q, k, window, kernel, pooling), budget))


def blended(scores: list[list[float]], budget: int, safeguard: float) -> list[list[int]]:
    """Columns that each head keeps of scores with a window at the end, as in AdaKV."""
    heads, window = len(scores), scores[0].count(float("inf"))
    if budget < window:
        return [best(of_head, budget) for of_head in scores]
    rest = (budget - window) * heads
    ranking = sorted((x, column, head) for head, row in enumerate(scores) for column, x in enumerate(row[:-window]))
    highest = [head for _, _, head in ranking[len(ranking) - rest :]]
    quotas = [Fraction(highest.count(head)) * (1 - safeguard) + safeguard * rest / heads for head in range(heads)]
    shares = [math.floor(quota) for quota in quotas]
    for head in sorted(range(heads), key=lambda h: shares[h] - quotas[h])[: rest - sum(shares)]:
        shares[head] += 1
    return [best(row, window + share) for row, share in zip(scores, shares, strict=True)]


def after_a_sure_share(scores: list[list[float]], budget: int, safeguard: float) -> list[list[int]]:
    """As `blended`, in kvpress's form."""
    scored = []
    for head, row in enumerate(scores):
        safe = int(safeguard * budget)
        sure = best(row, safe) if safe else []
        scored += [(float("inf") if column in sure else x, column, head) for column, x in enumerate(row)]
    # Among equal scores the later column; among the heads at one column, the last.
    expected = sorted(scored)[-budget * len(scores) :]
    return [[column for _, column, h in expected if h == head] for head in range(len(scores))]


@pytest.mark.parametrize(
    ("head_budget", "reference"), [("adaptive", blended), ("adaptive-kvpress", after_a_sure_share)]
)
@examples(60)
@given(layer=layers(), safeguard=st.sampled_from([0, 0.25, 0.75, 1]), **window_options)
def test_adaptive_heads_share_one_budget(head_budget, reference, layer, safeguard, window, kernel, pooling):
    queries, keys, values, prompt = layer
    prompt = dataclasses.replace(prompt, settings=Settings(head_budget=head_budget, safeguard=safeguard))
    cluster = kvcompress.make_cluster("adakv", window_size=window, kernel_size=kernel, pooling=pooling)
    kept = cluster.update_kv(queries, keys, values, prompt)
    groups, kv_heads = queries.shape[1] // keys.shape[1], keys.shape[1]
    for row, (length, budget) in enumerate(zip(prompt.lengths, prompt.budgets, strict=True)):
        first = keys.shape[2] - length
        scores = []
        for head in range(kv_heads):
            q = queries[row, head * groups : (head + 1) * groups, first:].double()
            scores.append(snapkv_scores(q, keys[row, head, first:].double(), window, kernel, pooling))
        for head, expected in enumerate(reference(scores, budget, Fraction(safeguard))):
            slots = kept.indices[row, head]
            assert (slots[slots >= 0] - first).tolist() == sorted(expected)


def in_16_bits(dtype: torch.dtype, shape: str, columns: int = 60) -> list[torch.Tensor]:
    """Queries, keys and values of two rows; `outliers`: two channels of the keys as large as those of Qwen2."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, columns, 16, generator=generator) for heads in (4, 2, 2))
    if shape == "outliers":
        keys[..., [3, 7]] = keys[..., [3, 7]] * 5 + torch.tensor([300, -450])
        queries[..., [3, 7]] *= 0.05
    return [states.to(dtype) for states in (queries, keys, values)]


def view_in(dtype: torch.dtype, given_in: torch.dtype, **settings: object) -> kvcompress.LayerView:
    """Of two rows, one padded: the numbers are those of `given_in`, as `dtype`."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(2, 60, 16, generator=generator)
    cos, sin = (part.to(given_in).to(dtype) for part in (angles.cos(), angles.sin()))
    module = SimpleNamespace(o_proj=torch.nn.Linear(64, 64, dtype=dtype))
    module.o_proj.weight.data = torch.randn(64, 64, generator=generator).to(given_in).to(dtype)
    rotary = Rotary(cos, sin, torch.arange(60).expand(2, -1), torch.ones(8))
    view = kvcompress.LayerView(0, 2, [60, 41], [20, 14], 0.25, torch.tensor([[0], [19]]), row_seeds=(1, 2))
    known = {"module": module, "rotary": rotary, "received": torch.ones(2, 2, 60).cumsum(2)}
    return dataclasses.replace(view, settings=Settings(**settings), **known)


sixteen_bits = pytest.mark.parametrize(
    ("given_in", "shape"), list(itertools.product([torch.bfloat16, torch.float16], ["plain", "outliers"]))
)


@sixteen_bits
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_fp32_also_for_states_in_16_bits(method, given_in, shape):
    """The same entries are kept in 16 bits as of the same numbers in fp32: no sum, norm or softmax is rounded."""
    cluster = kvcompress.make_cluster(method, **calibration_of(method, FAMILIES["qwen2"].build(2)))

    def scored(dtype: torch.dtype) -> tuple[torch.Tensor, kvcompress.Kept]:
        states = [part.to(dtype) for part in in_16_bits(given_in, shape)]
        view = view_in(dtype, given_in, cluster=cluster)
        return cluster.score(*states, view), cluster.update_kv(*states, view)

    (scores, kept), (expected, kept_in_fp32) = scored(given_in), scored(torch.float32)
    assert scores.dtype == torch.float32
    assert kept.keys.dtype == kept.values.dtype == given_in
    assert torch.equal(kept.indices, kept_in_fp32.indices)
    finite = expected.isfinite() & (torch.arange(60) >= torch.tensor([0, 19])[:, None, None])
    torch.testing.assert_close(scores[finite], expected[finite], rtol=1e-5, atol=1e-6)


@sixteen_bits
@pytest.mark.parametrize("merge", MERGES)
def test_what_is_merged_in_16_bits_is_what_is_merged_of_the_same_numbers_in_fp32(merge, given_in, shape):
    cluster = kvcompress.make_cluster("h2o")
    kept, expected = (
        cluster.update_kv(
            *(part.to(dtype) for part in in_16_bits(given_in, shape)), view_in(dtype, given_in, merge=merge)
        )
        for dtype in (given_in, torch.float32)
    )
    used = kept.indices >= 0
    assert torch.equal(kept.indices, expected.indices)
    for name in ("keys", "values"):
        merged = getattr(kept, name)
        assert merged.dtype == given_in
        torch.testing.assert_close(merged[used], getattr(expected, name)[used].to(given_in))


@sixteen_bits
@pytest.mark.parametrize("name", [name for name, rule in list_layer_budgets().items() if rule.is_measured])
def test_a_layer_is_measured_in_16_bits_as_of_the_same_numbers_in_fp32(name, given_in, shape):
    cluster, rule = kvcompress.make_cluster("snapkv", window_size=8), list_layer_budgets()[name]

    def measured(dtype: torch.dtype) -> torch.Tensor:
        states = [part.to(dtype) for part in in_16_bits(given_in, shape)]
        vision = (torch.arange(60) > 25) & (torch.arange(60) < 50)
        view = dataclasses.replace(view_in(dtype, given_in, cluster=cluster), vision=vision.expand(2, -1))
        return rule.measure(*states, cluster.score(*states, view), view)

    found, expected = measured(given_in), measured(torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
def test_scores_of_a_row_do_not_depend_on_how_large_another_rows_states_are(method):
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, h, 40, 16, generator=generator) for h in (4, 2, 2))
    angles = torch.randn(2, 40, 16, generator=generator)
    module = SimpleNamespace(o_proj=torch.nn.Linear(64, 64))
    rotary = Rotary(angles.cos(), angles.sin(), torch.arange(40).expand(2, -1), torch.ones(8))
    view = kvcompress.Prompt(0, 2, [40, 40], [10, 10], 0.25, None, row_seeds=(1, 2))
    view = dataclasses.replace(view, module=module, rotary=rotary, received=torch.ones(2, 2, 40).cumsum(2))
    scale = torch.tensor([1.0, 1e6])[:, None, None, None]
    cluster = kvcompress.make_cluster(method, **calibration_of(method, FAMILIES["qwen2"].build(2)))
    beside_small, beside_large = (cluster.update_kv(queries, keys, v, view) for v in (values, values * scale))
    assert torch.equal(beside_small.indices[0], beside_large.indices[0])
    scores = (cluster.score(queries, keys, v, view)[0] for v in (values * 1e-3, values * 1e-3 * scale))
    torch.testing.assert_close(*scores)


def test_values_are_projected_block_by_block_as_they_are_at_once(monkeypatch):
    """The norms that CriticalKV weighs with; all projections of a long prompt are never held together."""
    values, module = torch.randn(3, 2, 7, 4), SimpleNamespace(o_proj=torch.nn.Linear(16, 8))
    view = kvcompress.Prompt(0, 2, [7] * 3, [3] * 3, 0.25, module=module)
    expected = criticalkv.projected_norm(values, view, "criticalkv")
    monkeypatch.setattr(criticalkv, "BLOCK", 2)
    torch.testing.assert_close(criticalkv.projected_norm(values, view, "criticalkv"), expected)


@pytest.mark.parametrize("pads", [1, 9])
def test_r_kvs_mean_likeness_counts_no_pads(pads):
    keys = torch.randn(1, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    alone = redundancy(keys[:, :, pads:], 0.5, None)
    padded = redundancy(keys, 0.5, torch.tensor([[pads]]))
    assert not padded[..., :pads].any()
    torch.testing.assert_close(padded[..., pads:], alone, rtol=1e-5, atol=0)


def test_no_head_takes_a_share_that_it_cannot_fill():
    """While decoding heads hold different numbers of entries, aligned to the right."""
    scores = torch.stack([torch.arange(10.0, 20), torch.arange(0.0, 10)])[None]
    kept = adaptive_indices(scores, [4], safeguard=1.0, padding=torch.tensor([[0, 8]]))[0]
    assert kept[0].tolist() == [4, 5, 6, 7, 8, 9]
    assert kept[1].tolist() == [-1] * 4 + [8, 9]


def random_kept(seed: int, row_seed: int, layer: int = 0, length: int = 100) -> torch.Tensor:
    keys = torch.zeros(1, 2, length, 4)
    prompt = kvcompress.Prompt(layer, 2, [length], [length // 5], SCALING, row_seeds=(row_seed,))
    return kvcompress.make_cluster("random", seed=seed, window_size=4).update_kv(keys, keys, keys, prompt).indices[0]


def test_random_keeps_the_window_and_differs_by_seed_prompt_layer_and_head():
    base = random_kept(seed=0, row_seed=1)
    assert base[:, -4:].tolist() == [[96, 97, 98, 99]] * 2
    others = [random_kept(1, 1), random_kept(0, 2), random_kept(0, 1, layer=1), base.flip(0)]
    assert all(not torch.equal(base, other) for other in others)
    assert torch.equal(base, random_kept(seed=0, row_seed=1))


def test_random_draws_every_column_equally_often():
    counts = torch.zeros(96)
    draws = 500
    for row_seed in range(draws):
        for head in random_kept(seed=0, row_seed=row_seed):
            counts[head[:-4]] += 1
    expected = draws * 2 * 16 / 96
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 150  # 95 degrees of freedom: beyond 150 once in 5,000
