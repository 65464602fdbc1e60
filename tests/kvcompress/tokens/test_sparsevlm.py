"""SparseVLM: its raters, and how many tokens stay step by step."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.token_methods import batch, entering, vision_of


def test_sparsevlm_finds_its_raters_by_what_enters_the_first_layer(monkeypatch):
    cls, given = kvcompress.list_methods()["sparsevlm"].cls, []
    prepare = cls.prepare
    monkeypatch.setattr(cls, "prepare", lambda self, tokens: given.append(tokens) or prepare(self, tokens))
    model, inputs = batch("qwen2-vl")
    with entering(model, 0) as states, kvcompress.compress(model, "sparsevlm", 0.5):
        generate(model, inputs, 1)
    assert torch.equal(given[0].hidden, states[0])
    assert torch.equal(given[0].vision, vision_of(inputs))


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
