"""SparseVLM: what the raters attend to, step by step, and what is recycled."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens import Tokens
from tests.support.examples import paired
from tests.support.families import VLM_FAMILIES
from tests.support.token_methods import as_hidden, batch, budget, entering, vision_of


@pytest.mark.parametrize(("family", "ratio"), paired(list(VLM_FAMILIES), [0.1, 0.4, 0.8]))
def test_sparsevlm_keeps_what_the_raters_attend_to_step_by_step(family, ratio):
    model, inputs = batch(family, layers=12)
    with entering(model, 0) as states:
        generate(model, inputs, 1)
    kept, _, _, weights = as_hidden(model, inputs, "sparsevlm", ratio, recycle=0.0)
    method = kvcompress.list_methods()["sparsevlm"].cls(recycle=0.0)
    assert method.layers(12) == [1, 3, 6]
    for row, vision in enumerate(vision_of(inputs)):
        columns = vision.nonzero()[:, 0]
        if not len(columns):
            continue
        embeddings = states[0][row].double()
        text = torch.arange(int(columns[-1]) + 1, len(vision))
        affinity = (embeddings[columns] @ embeddings[text].T).softmax(1).mean(0)
        raters = text[affinity >= affinity.mean()]
        left = columns
        counts = method.budgets(budget(ratio, len(columns)), len(columns), 12)
        for layer, count in zip([1, 3, 6], counts, strict=True):
            rated = weights[layer - 1][row].double().mean(0)[raters][:, left].mean(0)
            left = left[rated.topk(count).indices.sort().values]
            assert [c for c in kept[layer][row] if c < len(vision) and vision[c]] == left.tolist()


@pytest.mark.parametrize(("asked", "counts"), [(192, (300, 200, 110)), (128, (303, 110, 36)), (64, (66, 30, 17))])
def test_sparsevlm_has_the_published_counts_and_their_clusters_where_their_mean_is_asked_for(asked, counts):
    method = kvcompress.list_methods()["sparsevlm"].cls(counts=counts)
    assert method.layers(32) == [3, 7, 16]
    totals, left = [], 576
    for count in counts:
        clusters = (int(0.3 * (left - count)) + 1) // 10 + 1
        left = count + clusters
        totals.append(left)
    assert method.budgets(asked, 576, 32) == totals
    # What comes out of a layer, those before the first step included: as the released code counts.
    assert int((2 * 576 + 4 * totals[0] + 9 * totals[1] + 17 * totals[2]) / 32) == asked


def test_sparsevlm_keeps_in_the_mean_over_all_layers_what_was_asked_for():
    method, full, spans = kvcompress.list_methods()["sparsevlm"].cls(), 576, (4, 9, 17)
    for kept in (38, 64, 100, 193, 400, 570, 576):
        counts = method.budgets(kept, full, 32)
        assert counts == sorted(counts, reverse=True)
        mean = (2 * full + sum(span * count for span, count in zip(spans, counts, strict=True))) / 32
        assert abs(mean - kept) <= 1
    assert method.budgets(0, 0, 32) == [0, 0, 0]
    with pytest.raises(kvcompress.KVCompressError, match=r"20 of 576 vision tokens.*2 layers hold all"):
        method.budgets(20, full, 32)


def test_sparsevlm_recycles_the_best_of_what_it_drops_into_clusters():
    generator = torch.Generator().manual_seed(0)
    vision = torch.zeros(2, 70, dtype=torch.bool)
    vision[0, 5:65] = vision[1, 20:60] = True
    hidden, scores = torch.randn(2, 70, 8, generator=generator), torch.rand(2, 70, generator=generator)
    method = kvcompress.list_methods()["sparsevlm"].cls(recycle=0.5, tokens_per_cluster=5)
    tokens = Tokens(vision, None, [10, 1], hidden)
    chosen, merged = method.choose(scores, tokens)
    assert chosen.sum(1).tolist() == [10, 1]
    recycled = 28  # 55 // 2 + 1 of the 55 that are not among the best 5, in as many clusters as there are best
    order = scores[0].masked_fill(~vision[0], -1).argsort(descending=True).tolist()
    dominant, second = order[:5], order[5 : 5 + recycled]
    states = hidden[0, second].double()
    distances = (states[:, None] - states[None]).square().mean(-1).sqrt()
    density = (-distances.sort(1).values[:, :5].square().mean(1)).exp()
    apart = [
        min(
            (distances[i, j].item() for j in range(recycled) if density[j] > density[i]), default=distances.max().item()
        )
        for i in range(recycled)
    ]
    peaks = (torch.tensor(apart) * density).topk(5).indices.tolist()
    assert sorted(dominant + [second[i] for i in peaks]) == chosen[0].nonzero()[:, 0].tolist()
    cluster = [peaks.index(i) if i in peaks else int(distances[i, peaks].argmin()) for i in range(recycled)]
    expected = hidden.double().clone()
    for number, peak in enumerate(peaks):
        expected[0, second[peak]] = states[[i for i in range(recycled) if cluster[i] == number]].mean(0)
    torch.testing.assert_close(merged.double(), expected, atol=1e-6, rtol=0)
