"""What no recording of the authors' code shows of attention methods and layer budgets, against plain references:
float64, the full attention matrix, loops; row by row, written from the papers' formulas."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.layer_budgets import layer_budget, lazy
from kvcompress.scoring.layer_view import Settings
from tests.oracle.authors.ours import ours as run
from tests.oracle.authors.states import states
from tests.support.examples import examples
from tests.support.families import FAMILIES
from tests.support.kept import kept_of
from tests.support.plain_reference import SCALING, best, check, layers

INF = float("inf")
reference_test = examples(40)


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q (groups, length, head_dim), k (length, head_dim): causal weights (groups, length, length)."""
    hidden = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
    return (q @ k.T * SCALING).masked_fill(hidden, -INF).softmax(-1)


def recent_first(scores: torch.Tensor, recent: int) -> list[float]:
    """In fp32, as the library scores, and the last `recent` tokens above all."""
    return [*scores.float().tolist()[: max(len(scores) - recent, 0)], *[INF] * min(recent, len(scores))]


def test_cake_s_variance_is_that_of_a_row_alone_beside_a_short_row():
    cluster = kvcompress.make_cluster("cake", window_size=4)
    weights = torch.rand(2, 1, 2, 4, 9, dtype=torch.float64)
    in_window = torch.tensor([[True] * 4, [False, True, True, True]])[:, None, None, :, None]
    alone = [cluster.votes(row[None, ..., -used:, :], None) for row, used in zip(weights, (4, 3), strict=True)]
    torch.testing.assert_close(cluster.votes(weights, in_window), torch.cat(alone))


@reference_test
@given(layer=layers(), sinks=st.sampled_from([0, 1, 4]), recent=st.sampled_from([0.0, 0.25, 0.5]))
def test_sagekv_keeps_sinks_recent_tokens_and_what_the_last_query_attends_to(layer, sinks, recent):
    def reference(q, k, v, budget):
        scores = recent_first(attention(q, k)[:, -1].mean(0), max(1, int(recent * budget)))
        return best([INF if column < sinks else score for column, score in enumerate(scores)], budget, sinks)

    check(kvcompress.make_cluster("sagekv", sinks=sinks, recent=recent), layer, reference)


@pytest.mark.parametrize("options", [{}, {"sinks": 0, "recent": 0.0}, {"layer_budget": "sparsity"}])
def test_sagekv_chooses_once_and_lets_the_recent_window_slide(options):
    given, prompt, budget, decoded = states("random_gqa"), 100, 40, 30
    held = run(given, prompt, decoded, "sagekv", budget, decode_budget=budget, **options)
    sinks = options.get("sinks", 4)
    for place, layer in enumerate(held.kept):
        queries, keys, _ = (x[0].double() for x in given.layer(place, slice(0, prompt)))
        size = int(layer[0].sum())
        recent = max(1, int(options.get("recent", 0.5) * size))
        attended = (queries[:, -1:].unflatten(0, (len(keys), -1)) @ keys[:, None].mT * keys.shape[-1] ** -0.5)[:, :, 0]
        for head, scores in zip(layer, attended.softmax(-1).mean(1), strict=True):
            choice = best(scores[sinks : prompt - recent].tolist(), size - recent - sinks)
            kept = {*range(sinks), *(sinks + column for column in choice)}
            kept |= {*range(prompt + decoded - recent, prompt + decoded)}
            assert set(head.nonzero().flatten().tolist()) == kept


@reference_test
@given(
    layer=layers(),
    window=st.sampled_from([1, 3, 8, 64]),
    balance=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    similar=st.sampled_from([0.1, 0.5]),
    variant=st.sampled_from(["code", "paper"]),
)
def test_rkv_keeps_important_tokens_that_are_not_repeated(layer, window, balance, similar, variant):
    def reference(q, k, v, budget):
        w = min(window, len(k))
        logits = (q[:, len(k) - w :] @ k[: len(k) - w].T * SCALING).amax(0)  # (queries, keys before the window)
        votes = logits.softmax(-1).mean(0).tolist()
        importance = torch.tensor([max(votes[max(i - 3, 0) : i + 4]) for i in range(len(votes))], dtype=torch.float64)
        unit = k / k.norm(dim=-1, keepdim=True)
        likeness = unit @ unit.T
        likeness.fill_diagonal_(0)
        for row in likeness:
            alike = [column for column in range(len(k)) if row[column] > similar]
            if alike or variant == "code":
                row[alike[-1] if alike else 0] = 0
        redundancy = likeness.mean(0).softmax(-1)[: len(k) - w]
        scores = balance * importance - (1 - balance) * redundancy
        return best([*scores.float().tolist(), *[INF] * w], budget)

    options = {"window_size": window, "balance": balance, "similar": similar, "variant": variant}
    check(kvcompress.make_cluster("r-kv", **options), layer, reference)


@reference_test
@given(layer=layers(), sinks=st.sampled_from([0, 4]), variant=st.sampled_from(["code", "paper"]))
def test_d2o_keeps_sinks_recent_tokens_and_heavy_hitters(layer, sinks, variant):
    share = {"code": 0.5, "paper": 0.25}[variant]  # three heavy hitters to a recent token

    def reference(q, k, v, budget):
        scores = recent_first(attention(q, k).sum(1).mean(0), max(1, int(share * budget)))
        return best([INF if column < sinks else score for column, score in enumerate(scores)], budget, sinks)

    queries, keys, values, prompt = layer
    unmerged = dataclasses.replace(prompt, settings=Settings(merge="none"))
    check(kvcompress.make_cluster("d2o", sinks=sinks, variant=variant), (queries, keys, values, unmerged), reference)


# -- layer budgets


def measured(rule: str, layer: tuple, cluster: kvcompress.KVCluster | None = None) -> torch.Tensor:
    queries, keys, values, prompt = layer
    window = 0 if cluster is None else cluster.query_window
    prompt = dataclasses.replace(prompt, settings=Settings(cluster, window))
    return layer_budget(rule).measure(queries, keys, values, torch.zeros(keys.shape[:3]), prompt)


def rows(layer: tuple):
    """For each row: attention (heads, length, length) of its real tokens in all query heads."""
    queries, keys, _, prompt = layer
    groups = queries.shape[1] // keys.shape[1]
    for row, length in enumerate(prompt.lengths):
        q = queries[row, :, queries.shape[2] - length :].double()
        k = keys[row, :, keys.shape[2] - length :].double()
        yield torch.cat([attention(q[head : head + 1], k[head // groups]) for head in range(len(q))])


def test_cake_measures_layers_of_little_entropy_too():
    """Two observers and one key before them: at most 0.74."""
    keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]]])
    queries = torch.tensor([[[[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]]]])
    layer = (queries, keys, keys, kvcompress.Prompt(0, 1, [3], [2], 1.0, row_seeds=(0,)))
    (ours,) = measured("cake", layer, kvcompress.make_cluster("cake", window_size=2))
    first, second = (math.exp(a) / sum(map(math.exp, logits)) for a, logits in ((8, (8, 0)), (0, (0, 8, 4))))
    entropy = -sum(p * math.log(p + 1e-10) for p in (first, second))
    assert float(ours) == pytest.approx(entropy * ((first - second) ** 2 / 2), rel=1e-4)
    assert entropy < 1


@pytest.mark.parametrize("preset", kvcompress.list_methods()["cake"].presets)
def test_with_a_preset_cake_evicts_at_each_decode_step_as_the_authors_code_always_does(preset):
    """Down to the size of the preset in the mean over the layers, whatever was decoded."""
    size, model = int(preset.rpartition("-")[2]), FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [size + 72])
    with kvcompress.compress(model, "cake", preset=preset) as session:
        generate(model, inputs, 10)
    entries = [len(head) for layer in kept_of(session.cache) for head in layer[0]]
    assert sum(entries) == len(entries) * size


@reference_test
@given(layer=layers())
def test_variance_measures_what_keys_receive_between_least_and_largest_head(layer):
    for ours, weights in zip(measured("variance", layer), rows(layer), strict=True):
        if weights.shape[1] == 1:
            assert float(ours) == 0
            continue
        of_heads = weights.sum(1).var(-1)
        least, largest = of_heads.min(), of_heads.max()
        expected = ((of_heads - least) / (largest - least + 1e-6)).mean()
        assert float(ours) == pytest.approx(float(expected), rel=1e-3, abs=1e-3)


def test_variance_shares_by_the_softmax_of_the_negative():
    shares = layer_budget("variance").weights(torch.tensor([0.2, 0.9]), 10, 100)
    assert shares[0] / shares[1] == pytest.approx(math.exp(0.7))


@reference_test
@given(layer=layers(), last=st.sampled_from([1, 3, 10]), threshold=st.sampled_from([0.3, 0.5, 0.8]))
def test_lazy_layers_are_those_that_look_at_first_and_last_tokens(layer, last, threshold):
    cluster = kvcompress.make_cluster("simlayerkv", lazy_threshold=threshold)
    judges = [mock.patch.object(rule, "judges", 8) for rule in (lazy.LazyLayerBudget, lazy.PublishedLazyLayerBudget)]
    with judges[0], judges[1], mock.patch.multiple(lazy, FIRST=2, LAST=last):
        ours, published = (measured(rule, layer, cluster).tolist() for rule in ("lazy", "lazy-paper"))

    def is_lazy(weights: torch.Tensor, last: int) -> bool:
        length, spent = weights.shape[1], []
        for query in range(max(length - 8, 0), length):
            near = {*range(min(2, query + 1)), *range(max(query + 1 - last, 0), query + 1)}
            spent += [float(head[query, sorted(near)].sum()) for head in weights]
        return sum(spent) / len(spent) > threshold

    for share, in_paper, weights, budget in zip(ours, published, rows(layer), layer[3].budgets, strict=True):
        assert share == (lazy.SHARE if is_lazy(weights, last) else 1.0)
        assert in_paper == is_lazy(weights, max(budget - 2, 0)), "the paper's looks at what a lazy layer keeps"


def test_a_lazy_layer_gives_three_quarters_of_its_share_to_the_others():
    prompt = kvcompress.Prompt(0, 4, [4000], [350], 1.0)
    measured = torch.tensor([[1.0], [lazy.SHARE], [lazy.SHARE], [1.0]])
    assert layer_budget("lazy").budgets(prompt, measured) == [[560], [140], [140], [560]]


# -- the variants of EffiVLM-Bench: a tenth of the budget, at least one token, is the window


def test_effivlm_random_keeps_the_last_tenth():
    keys = torch.zeros(1, 1, 200, 4)
    prompt = kvcompress.Prompt(0, 1, [200], [50], SCALING, row_seeds=(3,))
    kept = kvcompress.make_cluster("random", variant="effivlm").update_kv(keys, keys, keys, prompt).indices[0, 0]
    assert kept[-5:].tolist() == [195, 196, 197, 198, 199]
    assert kept[-8] < 192


@pytest.mark.parametrize(("budget", "length"), [(100, 1000), (40, 60), (60, 60), (1, 5), (300, 1000)])
def test_effivlm_pyramid_is_theirs_to_the_rounding_of_its_steps_with_an_exact_sum(budget, length):
    num_layers, window = 28, max(1, int(0.1 * budget))
    ours = layer_budget("pyramid-effivlm").fixed(budget, length, num_layers, 32, 20.0)
    assert sum(ours) == budget * num_layers
    least = (budget - window) // 20
    most = 2 * (budget - window) - least
    if most >= length - window:
        most = length - window
        least = 2 * (budget - window) - most
    step = (most - least) // (num_layers - 1)
    theirs = [most - layer * step + window for layer in range(num_layers)]
    if length < 2 * (budget - window):
        theirs = [budget] * num_layers
    assert abs(ours[0] - theirs[0]) <= 1
    assert all(-2 <= b - a <= layer + 1 for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)))
