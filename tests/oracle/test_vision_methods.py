"""The vision-language methods against plain references: float64, the full attention matrix, row by row, from the
papers' formulas. Batches are padded on the left; vision tokens stand anywhere, in some rows nowhere."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompress
from kvcompress.layer_budgets import layer_budget
from kvcompress.vision import text_first
from tests.kvcompress.test_clusters import SCALING, layers
from tests.kvcompress.test_merging import merged_by_hand

INF = float("inf")
oracle = settings(max_examples=40, deadline=None)


@st.composite
def vision_layers(draw: st.DrawFn) -> tuple:
    """As `layers`, with vision tokens: none, a span (at the start, in the middle, at the end) or scattered."""
    queries, keys, values, prompt = draw(layers())
    columns = keys.shape[2]
    vision = torch.zeros(len(prompt.lengths), columns, dtype=torch.bool)
    for row, length in enumerate(prompt.lengths):
        kind = draw(st.sampled_from(["none", "span", "scattered"]))
        if kind == "span":
            first = draw(st.integers(0, length - 1))
            vision[row, columns - length + first : columns - length + draw(st.integers(first, length))] = True
        elif kind == "scattered":
            generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
            vision[row, columns - length :] = torch.rand(length, generator=generator) < 0.5
    return queries, keys, values, dataclasses.replace(prompt, vision=vision)


class Row:
    """One row's real tokens in float64: q (heads, n, dim), k, v (kv_heads, n, dim), vision (n,), budget, and the full
    causal attention A (heads, n, n)."""

    def __init__(self, layer: tuple, row: int):
        queries, keys, values, prompt = layer
        self.n, self.budget = prompt.lengths[row], prompt.budgets[row]
        self.first = keys.shape[2] - self.n
        self.q, self.k, self.v = (states[row, :, self.first :].double() for states in (queries, keys, values))
        self.vision = [False] * self.n if prompt.vision is None else prompt.vision[row, self.first :].tolist()
        self.kv_heads, self.groups = keys.shape[1], queries.shape[1] // keys.shape[1]
        repeated = self.k.repeat_interleave(self.groups, 0)
        self.logits = self.q @ repeated.transpose(1, 2) * SCALING
        self.logits = self.logits.masked_fill(torch.ones(self.n, self.n).triu(1).bool(), -INF)
        self.A = self.logits.softmax(-1)

    def of_head(self, head: int, matrix: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a KV head, averaged over its query heads: (n, n)."""
        matrix = self.A if matrix is None else matrix
        return matrix[head * self.groups : (head + 1) * self.groups].mean(0)

    @property
    def text(self) -> list[int]:
        return [i for i in range(self.n) if not self.vision[i]]

    @property
    def images(self) -> list[int]:
        return [i for i in range(self.n) if self.vision[i]]

    @property
    def observers(self) -> list[int]:
        """Queries behind the last vision token; the last 32 where there are none."""
        if self.images and self.images[-1] < self.n - 1:
            return list(range(self.images[-1] + 1, self.n))
        return list(range(max(0, self.n - 32), self.n))


def rows_of(layer: tuple) -> list[Row]:
    return [Row(layer, row) for row in range(len(layer[-1].lengths))]


def agree(ours: list[int], ranks: list[tuple], budget: int) -> None:
    """`ours` are the columns of the `budget` highest ranks (tier, score); the later one of two equals. Scores that
    fp32 cannot tell apart may change places."""
    order = sorted(range(len(ranks)), key=lambda column: (*ranks[column], column))
    expected = order[-budget:] if budget else []
    assert len(ours) == len(set(ours)) == len(expected)
    surplus, missing = set(ours) - set(expected), set(expected) - set(ours)
    for a, b in zip(sorted(surplus, key=order.index), sorted(missing, key=order.index), strict=True):
        assert ranks[a][0] == ranks[b][0], (ours, sorted(expected))
        assert ranks[a][1] == pytest.approx(ranks[b][1], rel=1e-5, abs=1e-6), (ours, sorted(expected))


def check(cluster: kvcompress.KVCluster, layer: tuple, reference) -> None:
    """`reference(row, head)` gives (tier, score) of each of the row's tokens."""
    queries, keys, values, prompt = layer
    kept = cluster.update_kv(queries, keys, values, prompt)
    for number, row in enumerate(rows_of(layer)):
        for head in range(row.kv_heads):
            slots = kept.indices[number, head]
            assert slots.tolist() == sorted(slots.tolist())
            agree((slots[slots >= 0] - row.first).tolist(), reference(row, head), row.budget)


def with_recent(ranks: list[tuple], recent: int) -> list[tuple]:
    """The last `recent` tokens above all."""
    return [(9, 0.0) if i >= len(ranks) - recent else rank for i, rank in enumerate(ranks)]


@given(scores=st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=30), seed=st.integers(0, 100))
def test_text_ranks_above_vision_and_each_kind_keeps_its_order(scores, seed):
    vision = torch.rand(1, len(scores), generator=torch.Generator().manual_seed(seed)) < 0.5
    prompt = kvcompress.Prompt(0, 1, [len(scores)], [1], 1.0, vision=vision)
    plain = torch.tensor(scores)[None, None]
    changed = text_first(plain, prompt)
    assert changed.isfinite().all()
    text, images = changed[:, :, ~vision[0]], changed[:, :, vision[0]]
    assert not text.numel() or not images.numel() or text.min() > images.max()
    by_score = images[..., plain[0, 0, vision[0]].argsort()]
    assert torch.equal(by_score, by_score.sort(-1).values)
    assert torch.equal(text, plain[:, :, ~vision[0]])
    small = torch.tensor([[[1e-9, 1.1e-9]]])
    assert text_first(small, dataclasses.replace(prompt, vision=torch.tensor([[True, True]]))).diff() > 0


@oracle
@given(layer=vision_layers(), recent=st.sampled_from([0.0, 0.5, 1.0]), variant=st.sampled_from(["paper", "effivlm"]))
def test_look_m_keeps_recent_tokens_and_heavy_text_before_heavy_vision(layer, recent, variant):
    def reference(row, head):
        sums = row.of_head(head).sum(0).tolist()
        ranks = [(0 if row.vision[i] else 1, score) for i, score in enumerate(sums)]
        return with_recent(ranks, max(1, int(0.1 * row.budget)) if variant == "effivlm" else int(recent * row.budget))

    check(kvcompress.make_cluster("look-m", recent=recent, variant=variant), layer, reference)


@oracle
@given(layer=vision_layers(), merge=st.sampled_from([None, "average", "weighted"]), same=st.booleans())
def test_look_m_merges_by_pivots_unless_told_otherwise(layer, merge, same):
    queries, keys, values, prompt = layer
    prompt = dataclasses.replace(prompt, merge=merge, merge_modality="same" if same else "any")
    kept = kvcompress.make_cluster("look-m").update_kv(queries, keys, values, prompt)
    for number, row in enumerate(rows_of(layer)):
        for head in range(row.kv_heads):
            slots = kept.indices[number, head]
            columns = (slots[slots >= 0] - row.first).tolist()
            kind = row.vision if same else None
            expected = merged_by_hand(row.k[head], row.v[head], columns, merge or "pivot", kind)
            for part, wanted in zip((kept.keys, kept.values), expected, strict=True):
                torch.testing.assert_close(part[number, head, slots >= 0].double(), wanted, atol=1e-5, rtol=0)


@oracle
@given(layer=vision_layers(), recent=st.sampled_from([0.0, 0.1, 0.6]), variant=st.sampled_from(["paper", "effivlm"]))
def test_vl_cache_keeps_what_the_queries_behind_the_last_image_attend_to(layer, recent, variant):
    def reference(row, head):
        ranks = [(0, score) for score in row.of_head(head)[row.observers].sum(0).tolist()]
        return with_recent(ranks, max(1, int(0.1 * row.budget)) if variant == "effivlm" else int(recent * row.budget))

    check(kvcompress.make_cluster("vl-cache", recent=recent, variant=variant), layer, reference)


def test_vl_caches_window_is_a_tenth_of_the_layers_own_budget_or_of_the_mean():
    scores = torch.arange(100.0, 0, -1)[None, None]  # the first tokens are the best
    mean, own = (kvcompress.Prompt(0, 2, [100], [budget], 1.0) for budget in (40, 60))
    kept = kvcompress.make_cluster("vl-cache").select(scores, own)[0, 0].tolist()
    assert kept == [*range(54), *range(94, 100)]
    zeros = torch.zeros(1, 1, 100, 4)
    cluster = kvcompress.make_cluster("vl-cache", variant="effivlm")
    scores = cluster.score(zeros, zeros, zeros, mean)
    assert torch.isinf(scores[0, 0]).nonzero().flatten().tolist() == [96, 97, 98, 99]


def measured(rule: str, layer: tuple, scores: torch.Tensor | None = None) -> torch.Tensor:
    queries, keys, values, prompt = layer
    return layer_budget(rule).measure(queries, keys, values, scores, prompt)


def test_the_hybrid_layer_budget_is_four_fifths_even_and_one_fifth_by_density():
    rule = layer_budget("hybrid")
    assert rule.weights(torch.tensor([0.1, 0.3]), 10, 100) == pytest.approx([0.4 + 0.05, 0.4 + 0.15])
    prompt = kvcompress.Prompt(0, 2, [100], [10], 1.0)
    assert rule.budgets(prompt, torch.tensor([[0.1], [0.3]])) == [[9], [11]]
