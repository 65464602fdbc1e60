"""The vision-language methods against plain references: float64, the full attention matrix, row by row, from the
papers' formulas. Batches are padded on the left; vision tokens stand anywhere, in some rows nowhere."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.layer_budgets import layer_budget
from kvcompress.scoring.layer_view import Settings
from kvcompress.scoring.vision import frame_tokens, text_first
from kvcompress.scoring.windows import protect_ends
from tests.support.examples import examples
from tests.support.families import FAMILIES, IMAGE, VIDEO
from tests.support.plain_reference import SCALING, layers, snapkv_scores

INF = float("inf")
oracle = examples(40)


@st.composite
def vision_layers(draw: st.DrawFn) -> tuple:
    """As `layers`, with vision tokens: none, a span (at the start, in the middle, at the end), scattered, or all."""
    queries, keys, values, prompt = draw(layers())
    columns = keys.shape[2]
    vision = torch.zeros(len(prompt.lengths), columns, dtype=torch.bool)
    for row, length in enumerate(prompt.lengths):
        kind = draw(st.sampled_from(["none", "span", "scattered", "all"]))
        if kind == "span":
            first = draw(st.integers(0, length - 1))
            vision[row, columns - length + first : columns - length + draw(st.integers(first, length))] = True
        elif kind != "none":
            generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
            vision[row, columns - length :] = torch.rand(length, generator=generator) < (
                0.5 if kind == "scattered" else 2
            )
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
    if len(scores) > 1:  # of heads that keep the same, the mean counts: one that ignores a token cannot rank it last
        heads, shared = torch.stack([plain[0, 0], plain[0, 0].flip(0)])[None], Settings(head_budget="shared")
        both = text_first(heads, dataclasses.replace(prompt, settings=shared))
        mean = heads.mean(1, keepdim=True).expand_as(heads)
        assert torch.equal(both, text_first(mean, prompt))
    small = torch.tensor([[[1e-9, 1.1e-9]]])
    assert text_first(small, dataclasses.replace(prompt, vision=torch.tensor([[True, True]]))).diff() > 0


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


@pytest.mark.parametrize(
    ("name", "even", "budgets"), [("hybrid", 0.8, [[9], [11]]), ("sparsity-effivlm", 0.1, [[6], [14]])]
)
def test_the_hybrid_layer_budgets_give_a_part_evenly_and_the_rest_by_density(name, even, budgets):
    rule = layer_budget(name)
    expected = [even / 2 + (1 - even) * part for part in (0.25, 0.75)]
    assert rule.weights(torch.tensor([0.1, 0.3]), 10, 100) == pytest.approx(expected)
    prompt = kvcompress.Prompt(0, 2, [100], [10], 1.0)
    assert rule.budgets(prompt, torch.tensor([[0.1], [0.3]])) == budgets


def test_sinks_are_a_rows_first_tokens_not_its_pads():
    ends = protect_ends(torch.zeros(2, 1, 8), 2, torch.tensor([[3], [0]]))
    assert [row.isinf().nonzero().flatten().tolist() for row in ends[:, 0]] == [[0, 1, 2, 3, 4, 7], [0, 1, 7]]


@pytest.mark.parametrize("method", ["prefixkv", "tgv-kv"])
def test_sinks_nobody_attends_to_stay_in_a_padded_row(method):
    keys = torch.ones(1, 1, 12, 4)
    keys[:, :, 5:7] = -10.0  # the row's first two tokens, behind five pads
    prompt = kvcompress.Prompt(0, 1, [7], [3], 1.0, padding=torch.tensor([[5]]))
    kept = kvcompress.make_cluster(method, sinks=2).update_kv(torch.ones(1, 1, 12, 4), keys, keys, prompt)
    assert kept.indices.tolist() == [[[5, 6, 11]]]


@oracle
@given(layer=vision_layers(), sinks=st.sampled_from([0, 1, 4]))
def test_prefixkv_keeps_what_all_queries_of_all_heads_attend_to(layer, sinks):
    def reference(row, head):
        ranks = [(0, score) for score in row.A.mean(0).sum(0).tolist()]
        return [(9, 0.0) if i < sinks or i == row.n - 1 else rank for i, rank in enumerate(ranks)]

    check(kvcompress.make_cluster("prefixkv", sinks=sinks), layer, reference)


@oracle
@given(layer=layers(), other=layers(), ratio=st.sampled_from([0.2, 0.5, 0.8]))
def test_the_prefix_budget_gives_every_layer_the_same_part_of_its_attention(layer, other, ratio):
    """Two rows' attention as if it were two layers of one prompt: the prefixes of one common part p fill the budget."""
    rule, (a, b) = layer_budget("prefix"), (Row(layer, 0), Row(other, 0))
    n = min(a.n, b.n)
    sums = [row.A[:, :n, :n].mean(0).sum(0) for row in (a, b)]
    total = 2 * max(1, round(ratio * n))
    prompt = kvcompress.Prompt(0, 2, [n], [total // 2], SCALING)
    scores = [s[None, None].float() for s in sums]
    kept = rule.budgets(prompt, torch.stack([measured("prefix", (None, None, None, prompt), s) for s in scores]))

    def prefixes(part: float) -> list[int]:
        """Tokens until their sum reaches `part`, and five that are protected."""
        sizes = []
        for s in sums:
            ranked, size, held = sorted(s.tolist(), reverse=True), 0, 0.0
            while held < part * sum(ranked) and size < n - 1:
                held, size = held + ranked[size], size + 1
            sizes.append(min(max(size, 1) + 5, n))
        return sizes

    sums_of_kept = [layer[0] for layer in kept]
    assert sum(sums_of_kept) == total
    fitting = [sizes for step in range(1001) if sum(sizes := prefixes(step / 1000)) <= total]
    if fitting and total - sum(fitting[-1]) <= 2:  # else the protected ones alone are too many, or p jumps
        assert all(abs(ours - size) <= 2 for ours, size in zip(sums_of_kept, fitting[-1], strict=True))


def test_a_layer_whose_attention_is_spread_keeps_more_by_prefix():
    prompt = kvcompress.Prompt(0, 2, [100], [30], 1.0)
    peaked, flat = 0.5 ** torch.arange(100.0), torch.ones(100)
    one, two = (measured("prefix", (None, None, None, prompt), s[None, None]) for s in (peaked, flat))
    # p = 0.485: one token holds half of the peaked layer, 49 that part of the flat one; five more in both.
    assert layer_budget("prefix").budgets(prompt, torch.stack([one, two])) == [[6], [54]]


@oracle
@given(layer=vision_layers(), recent=st.sampled_from([0.0, 0.3, 0.5]), cross=st.sampled_from([0.0, 0.1, 0.5]))
def test_csp_ranks_attention_within_and_across_modalities_apart(layer, recent, cross):
    def reference(row, head):
        window = max(1, int(recent * row.budget))
        rest = row.budget - window
        across = min(rest, max(1, int(cross * rest))) if cross else 0
        weights = row.logits.exp() / (1 + row.logits.exp().sum(-1, keepdim=True))
        voting = row.of_head(head, weights)[row.n - window :]
        same = torch.tensor([[row.vision[i] == seen for seen in row.vision] for i in range(row.n - window, row.n)])
        own, other = (voting * same).sum(0).tolist(), (voting * ~same).sum(0).tolist()
        ranks = [(0, score) for score in (other if any(other) else own)]
        past = sorted(range(row.n - window), key=lambda i: (own[i], i))
        for i in past[len(past) - (rest - across) :]:
            ranks[i] = (5, 0.0)
        return with_recent(ranks, window)

    check(kvcompress.make_cluster("csp", recent=recent, cross=cross), layer, reference)


def test_csp_ranks_a_row_of_one_modality_the_same_alone_and_padded():
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(1, 1, 20, 8, generator=generator) for _ in range(2))
    alone = kvcompress.Prompt(0, 1, [20], [10], SCALING, vision=torch.ones(1, 20, dtype=torch.bool))
    padded = dataclasses.replace(
        alone, padding=torch.tensor([[5]]), vision=torch.nn.functional.pad(alone.vision, (5, 0), value=False)
    )
    cluster = kvcompress.make_cluster("csp", cross=0.5)
    expected = cluster.update_kv(queries, keys, keys, alone).indices
    queries, keys = (torch.nn.functional.pad(states, (0, 0, 5, 0), value=1.0) for states in (queries, keys))
    assert torch.equal(cluster.update_kv(queries, keys, keys, padded).indices - 5, expected)


def minmax(x: list[float], mean: float) -> list[float]:
    span = max(x) - min(x)
    if span <= 1e-5 * max(map(abs, x)):  # two tokens are equally like their mean
        span = 0.0
    unit = [(value - min(x)) / span if span else 0.0 for value in x]
    return [value * mean / (sum(unit) / len(unit)) if any(unit) else 0.0 for value in unit]


@oracle
@given(layer=vision_layers(), window=st.sampled_from([1, 3, 8]), kernel=st.sampled_from([1, 5]))
def test_mixkv_mixes_attention_value_norm_and_unlikeness_by_redundancy(layer, window, kernel):
    def reference(row, head):
        past = max(0, row.n - window)
        attention = snapkv_scores(
            row.q[head * row.groups : (head + 1) * row.groups], row.k[head], window, kernel, "avg"
        )[:past]
        if not past:
            return [(9, 0.0)] * row.n
        mean = sum(attention) / past
        unit = [key / key.norm() for key in row.k[head][:past]]
        centre = sum(unit) / past
        alike = [float(a @ b) for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
        redundancy = sum(alike) / len(alike) if alike else 0.0
        diversity = minmax([-float(u @ centre) for u in unit], mean)
        norms = minmax([float(value.norm()) for value in row.v[head][:past]], mean)
        mixed = [
            redundancy * d + (1 - redundancy) * (a + v) for a, d, v in zip(attention, diversity, norms, strict=True)
        ]
        return [(0, score) for score in mixed] + [(9, 0.0)] * (row.n - past)

    cluster = kvcompress.make_cluster("mixkv", window_size=window, kernel_size=kernel, variant="paper")
    check(cluster, layer, reference)


@oracle
@given(layer=vision_layers(), recent=st.sampled_from([0.0, 0.5]))
def test_meda_keeps_recent_tokens_and_heavy_text_before_heavy_vision(layer, recent):
    def reference(row, head):
        ranks = [(0 if row.vision[i] else 1, score) for i, score in enumerate(row.of_head(head).sum(0).tolist())]
        return with_recent(ranks, int(recent * row.budget))

    check(kvcompress.make_cluster("meda", recent=recent), layer, reference)


@oracle
@given(layer=vision_layers())
def test_the_entropy_budgets_are_the_softmax_of_cross_modal_and_of_all_attentions_entropy(layer):
    def entropy(weights: list[float]) -> float:
        return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights if w)

    def of(row, asking, asked):
        total = sum(
            entropy(row.A[h, i, asked].tolist()) for h in range(len(row.A)) for i in asking if row.A[h, i, asked].any()
        )
        return total / len(row.A) / max(1, len(asking))

    ours = measured("entropy", layer)
    expected = [of(row, row.text, row.images) + of(row, row.images, row.text) for row in rows_of(layer)]
    assert ours.tolist() == pytest.approx(expected, abs=1e-4)
    alike = [-float(torch.xlogy(row.A, row.A).sum()) / len(row.A) / row.n for row in rows_of(layer)]
    assert measured("attention-entropy", layer).tolist() == pytest.approx(alike, abs=1e-4)
    shares = layer_budget("entropy").weights(torch.tensor([1.0, 2.0]), 10, 100)
    assert shares == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])


def elite_importance(row: Row, alpha: float) -> torch.Tensor:
    """(kv_heads, n): what the elite queries give to each token."""
    among_text = row.logits[:, -1, row.observers].softmax(-1).mean(0)
    last = dict(zip(row.observers, among_text.tolist(), strict=True))
    elite = [j for j in last if last[j] >= alpha * max(last.values())]
    total = torch.zeros(len(row.A), row.n, dtype=torch.float64)
    for h in range(len(row.A)):
        for e in elite:
            counted = sorted({*row.images, *elite} & set(range(e + 1)))
            among = torch.zeros(row.n, dtype=torch.float64)
            among[counted] = row.logits[h, e, counted].softmax(0)
            total[h] += torch.where(torch.tensor(row.vision), among, row.A[h, e]) / len(elite)
    return total.unflatten(0, (row.kv_heads, row.groups)).mean(1)


@oracle
@given(layer=vision_layers(), alpha=st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_aircache_evicts_the_vision_tokens_that_the_elite_attend_to_least(layer, alpha):
    def reference(row, head):
        scores = elite_importance(row, alpha)[head].tolist()
        return [(0 if row.vision[i] else 1, score) for i, score in enumerate(scores)]

    check(kvcompress.make_cluster("aircache", alpha=alpha), layer, reference)


@oracle
@given(layer=vision_layers(), alpha=st.sampled_from([None, 0.1, 0.5, 1.0]))
def test_the_strength_budget_measures_sum_and_skewness_of_the_vision_tokens_importance(layer, alpha):
    """With the method's `alpha`; 0.9 where it has none."""
    cluster = kvcompress.make_cluster("knorm") if alpha is None else kvcompress.make_cluster("aircache", alpha=alpha)
    *states, view = layer
    layer = (*states, dataclasses.replace(view, settings=Settings(cluster=cluster)))
    for ours, row in zip(measured("strength", layer).tolist(), rows_of(layer), strict=True):
        scores = elite_importance(row, alpha or 0.9).mean(0)[row.images]
        strength, skewness = float(scores.sum()), 0.0
        if len(scores) > 1:
            apart = scores - scores.mean()
            skewness = max(0.0, float((apart**3).mean() / (apart**2).mean() ** 1.5))
        assert ours == pytest.approx([strength, skewness, len(row.text)], abs=2e-3)


def test_the_strength_budget_shares_out_what_text_leaves():
    rule = layer_budget("strength")
    layers_measured = torch.tensor([[[0.2, 1.0, 10.0]], [[0.6, 3.0, 10.0]]])
    assert rule.budgets(kvcompress.Prompt(0, 2, [100], [30], 1.0), layers_measured) == [[20], [40]]
    assert rule.budgets(kvcompress.Prompt(0, 2, [100], [10], 1.0), layers_measured) == [[10], [10]]
    no_vision = torch.tensor([[[0.0, 0.0, 10.0]], [[0.0, 0.0, 10.0]]])
    assert rule.budgets(kvcompress.Prompt(0, 2, [100], [30], 1.0), no_vision) == [[30], [30]]


@oracle
@given(layer=vision_layers(), sinks=st.sampled_from([0, 2, 4]))
def test_tgv_kv_weights_the_questions_words_and_evicts_text_last(layer, sinks):
    def reference(row, head):
        mean, rows = row.A.mean(0), row.observers
        weight = {j: sum(float(mean[i, j]) for i in rows if i >= j) / (row.n - j) for j in rows}
        ranks = []
        for column in range(row.n):
            if row.vision[column]:
                ranks.append((0, sum(float(mean[j, column]) * weight[j] for j in rows)))
            else:
                ranks.append((1, float(mean[:, column].sum())))
        return [(9, 0.0) if i < sinks or i == row.n - 1 else rank for i, rank in enumerate(ranks)]

    check(kvcompress.make_cluster("tgv-kv", sinks=sinks), layer, reference)


@oracle
@given(layer=vision_layers())
def test_the_vision_budget_is_the_questions_attention_to_vision(layer):
    expected = [float(row.A.mean(0)[row.observers][:, row.images].sum()) for row in rows_of(layer)]
    assert measured("vision", layer).tolist() == pytest.approx(expected, abs=1e-4)


def test_infinipot_v_keeps_the_patch_that_changed_and_the_last_frame():
    """Eight frames of five tokens; all frames are alike but for the third token of the second frame."""
    frame = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    keys = frame.repeat(8, 1)[None, None]
    keys[0, 0, 7] *= -1
    prompt = kvcompress.Prompt(0, 1, [40], [11], 1.0, vision=torch.ones(1, 40, dtype=torch.bool), frame_tokens=(5,))
    kept = kvcompress.make_cluster("infinipot-v", tar=1.0).update_kv(keys, keys, keys, prompt).indices[0, 0].tolist()
    assert kept[0] == 7
    assert kept[1:] == list(range(30, 40))


T, V, I = 9, VIDEO, IMAGE  # noqa: E741


@pytest.mark.parametrize(
    ("family", "ids", "grid", "expected"),
    [
        ("qwen2-vl", [T, *[V] * 12, T], [[3, 4, 4]], 4),
        ("qwen2-vl", [T, *[V] * 12, T], None, 0),
        ("qwen3-vl", [*[V] * 4, T, *[V] * 4], [[2, 4, 4]], 4),
        ("qwen2.5-vl", [*[V] * 4, T, *[V] * 8], [[1, 4, 4], [2, 4, 4]], 4),
        ("qwen2.5-vl", [*[V] * 4, T, *[V] * 12], [[1, 4, 4], [2, 4, 6]], 0),
        ("qwen2.5-vl", [*[V] * 4, T, *[I] * 4], [[1, 4, 4]], 0),
        ("qwen2.5-vl", [*[I] * 4, T, *[I] * 4], None, 4),
        ("qwen2.5-vl", [*[I] * 4, T, *[I] * 3], None, 0),
        ("qwen2.5-vl", [T, *[I] * 4, T], None, 0),
        ("qwen2", [T, T, T], None, 0),
        ("llava-onevision", [T, *[V] * 4, T], None, 1),
        ("internvl", [T, *[I] * 9, T, *[I] * 9, T, *[I] * 9, T], None, 9),
    ],
)
def test_frames_are_found_by_grid_config_or_equal_spans(family, ids, grid, expected):
    config = FAMILIES[family].build().config
    grid = None if grid is None else torch.tensor(grid)
    assert frame_tokens(config, torch.tensor([ids]), grid) == (expected,)
    assert frame_tokens(config, torch.tensor([ids, [T] * len(ids)]), grid) == (expected, 0)


def test_where_the_config_does_not_say_how_patches_become_tokens_frames_are_unknown_not_an_error():
    config = SimpleNamespace(
        video_token_id=V, image_token_id=I, vision_config=SimpleNamespace(), model_type="video_llama_3"
    )
    assert frame_tokens(config, torch.tensor([[T, *[V] * 12]]), torch.tensor([[3, 4, 4]])) == (0,)


def test_each_row_has_the_frames_of_its_own_videos():
    config = FAMILIES["qwen2.5-vl"].build().config
    ids = torch.tensor([[T, *[V] * 12], [T, *[V] * 12], [T, *[V] * 6, *[T] * 6]])
    grid = torch.tensor([[3, 4, 4], [2, 4, 6], [1, 4, 6]])
    assert frame_tokens(config, ids, grid) == (4, 6, 6)
