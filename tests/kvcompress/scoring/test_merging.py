"""Merging of evicted entries against loops in float64, and what it does in a generation."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.scoring import merging
from kvcompress.scoring.layer_view import Settings, gather, uniform_noise
from kvcompress.scoring.merging import MERGES
from tests.support.examples import examples
from tests.support.families import FAMILIES
from tests.support.plain_reference import layers, merged_by_hand


@examples(60)
@given(
    layer=layers(), merge=st.sampled_from(["average", "pivot", "d2o", "d2o-paper"]), same=st.booleans(), data=st.data()
)
def test_every_evicted_entry_goes_into_the_kept_one_with_the_likest_key(layer, merge, same, data):
    queries, keys, values, prompt = layer
    vision = torch.rand(keys.shape[0], keys.shape[2], generator=torch.Generator().manual_seed(1)) < 0.5
    modality = "same" if same else "any"
    prompt = dataclasses.replace(prompt, settings=Settings(merge=merge, merge_modality=modality), vision=vision)
    cluster = kvcompress.make_cluster("snapkv", window_size=2)
    plain = cluster.update_kv(queries, keys, values, dataclasses.replace(prompt, settings=Settings(merge="none")))
    ours = cluster.update_kv(queries, keys, values, prompt)
    assert torch.equal(ours.indices, plain.indices)
    for row, length in enumerate(prompt.lengths):
        first = keys.shape[2] - length
        kind = vision[row, first:].tolist() if same else None
        for head in range(keys.shape[1]):
            slots = ours.indices[row, head]
            kept = (slots[slots >= 0] - first).tolist()
            real = keys[row, head, first:].double(), values[row, head, first:].double()
            expected = merged_by_hand(*real, kept, merge, kind)
            for part, wanted in zip((ours.keys, ours.values), expected, strict=True):
                torch.testing.assert_close(part[row, head, slots >= 0].double(), wanted, atol=1e-5, rtol=0)


def test_of_two_kept_entries_that_are_equally_like_the_later_takes_the_evicted_one():
    keys = torch.tensor([[0.6, 0.8], [0.0, 1.0], [-0.6, 0.8 - 2e-7]])[None, None]
    prompt = kvcompress.Prompt(0, 1, [3], [2], 1.0, row_seeds=(0,), settings=Settings(merge="average"))
    kept = kvcompress.make_cluster("knorm").keep(torch.tensor([[[1.0, 0.0, 1.0]]]), keys, keys, prompt)
    assert torch.equal(kept.keys[0, 0, 0], keys[0, 0, 0])
    torch.testing.assert_close(kept.keys[0, 0, 1], keys[0, 0, 1:].mean(0))


def test_weighted_merging_drops_what_is_in_the_mean_of_the_heads_less_like_than_all_that_is_evicted():
    keys = torch.tensor(
        [[[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [0.0, 0.1]], [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0, 1.0]]]
    )
    scores = torch.tensor([[[9.0, 0.0, 0.0, 9.0], [9.0, 0.0, 9.0, 0.0]]])
    prompt = kvcompress.Prompt(0, 1, [4], [2], 1.0, row_seeds=(0,), settings=Settings(merge="weighted"))
    kept = kvcompress.make_cluster("knorm").keep(scores, keys[None], keys[None], prompt)
    # The first that each head evicts are like to a kept one by 0.8, the second by 0.8 and 1: above the mean.
    torch.testing.assert_close(kept.keys[0, 0, 0], (keys[0, 0] + 0.8 * keys[0, 2]) / 2)
    torch.testing.assert_close(kept.keys[0, 0, 1], keys[0, 3])
    torch.testing.assert_close(kept.keys[0, 1], keys[1, [0, 2]])


def test_the_threshold_of_d2o_is_a_moving_average_from_eviction_to_eviction():
    keys = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [0.28, 0.96], [0.0, 1.0]])
    cosines = {1: 0.8, 2: 0.8, 3: 0.96}  # with the likest of the kept, which are columns 0 and 4
    keys, scores = keys[None, None], torch.tensor([[[9.0, 0.0, 0.0, 0.0, 9.0]]])
    prompt = kvcompress.Prompt(0, 1, [5], [2], 1.0, row_seeds=(0,), settings=Settings(merge="d2o"))
    kept = kvcompress.make_cluster("knorm").keep(scores, keys, keys, prompt)
    mean = sum(cosines.values()) / 3
    assert float(kept.merge_threshold) == pytest.approx(mean)
    assert torch.equal(kept.keys[0, 0, 0], keys[0, 0, 0]), "what is less like than the mean is dropped"
    assert not torch.equal(kept.keys[0, 0, 1], keys[0, 0, 4])
    later = dataclasses.replace(prompt, merge_threshold=torch.tensor([[0.5]]))
    kept = kvcompress.make_cluster("knorm").keep(scores, keys, keys, later)
    assert float(kept.merge_threshold) == pytest.approx((0.5 + mean) / 2)
    assert not torch.equal(kept.keys[0, 0, 0], keys[0, 0, 0])


def test_the_threshold_of_d2o_outlives_an_eviction_without_a_loss():
    """As under adaptive budgets: its mean is that of no entry, which must not become the threshold."""
    keys = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    whole, some = [0, 1, 2, 3, 4, 5], [-1, -1, -1, -1, 0, 5]
    prompt = kvcompress.Prompt(0, 1, [6], [4], 1.0, row_seeds=(0,), settings=Settings(merge="d2o"))

    def threshold(before: list[float] | None, *columns: list[int]) -> list[float]:
        kept = gather(keys, keys, torch.tensor([columns]))
        view = prompt if before is None else dataclasses.replace(prompt, merge_threshold=torch.tensor([before]))
        merged = merging.merge_evicted(kept, keys, keys, torch.zeros(1, 2, 6), view, "d2o")
        assert merged.keys.isfinite().all()
        return merged.merge_threshold[0].tolist()

    first = threshold(None, whole, some)
    assert math.isnan(first[0]), "nothing was evicted yet"
    assert threshold([0.5, 0.25], whole, some) == pytest.approx([0.5, (0.25 + first[1]) / 2])
    late = threshold(first, some, whole)
    assert math.isfinite(late[0]), "its first eviction sets it"
    assert late[1] == pytest.approx(first[1])


def test_while_decoding_d2o_drops_what_is_less_like_than_what_came_before():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40, 30])
    with kvcompress.compress(model, "d2o", 0.5, decode_budget=10, decode_interval=1) as session:
        thresholds = []
        for new in (2, 12):
            generate(model, inputs, new)
            thresholds.append(torch.stack([layer.memory.merge_threshold for layer in session.cache.layers]))
    assert thresholds[0].shape == (3, 2, 2)
    assert thresholds[1].isfinite().all()
    assert not torch.allclose(*thresholds)


@examples(60)
@given(layer=layers(), same=st.booleans(), followers=st.sampled_from([1, 3, 32]))
def test_cam_adds_an_evicted_value_to_those_behind_it_by_its_share_of_attention(layer, same, followers):
    queries, keys, values, prompt = layer
    vision = torch.rand(keys.shape[0], keys.shape[2], generator=torch.Generator().manual_seed(1)) < 0.5
    cluster = kvcompress.make_cluster("cam", followers=followers)
    settings = Settings(cluster, merge_modality="same" if same else "any")
    prompt = dataclasses.replace(prompt, settings=settings, vision=vision)
    plain = cluster.update_kv(queries, keys, values, dataclasses.replace(prompt, settings=Settings(merge="none")))
    scores = cluster.score(queries, keys, values, prompt).tolist()
    noise = uniform_noise(prompt, keys, "cam")
    ours = cluster.update_kv(queries, keys, values, prompt)
    assert torch.equal(ours.indices, plain.indices)
    assert torch.equal(ours.keys, plain.keys)
    for row, length in enumerate(prompt.lengths):
        for head in range(keys.shape[1]):
            used = ours.indices[row, head] >= 0
            kept = ours.indices[row, head, used].tolist()
            expected = {column: values[row, head, column].double() for column in kept}
            for column in set(range(keys.shape[2] - length, keys.shape[2])) - set(kept):
                behind = range(column + 1, min(column + 1 + followers, keys.shape[2]))
                mean = sum(scores[row][head][c] for c in behind) / max(len(behind), 1)
                if behind and noise[row, head, column] < scores[row][head][column] / mean:
                    for c in expected.keys() & set(behind):
                        if not same or vision[row, c] == vision[row, column]:
                            expected[c] = expected[c] + values[row, head, column].double() / followers
            wanted = torch.stack([expected[c] for c in kept])
            torch.testing.assert_close(ours.values[row, head, used].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda kept: None, "returned NoneType: it must be kvcompress.Kept"),
        (
            lambda kept: dataclasses.replace(kept, keys=kept.keys[:, :, 1:]),
            r"returned keys for .* \(1, 2, \d+\), values",
        ),
    ],
)
@pytest.mark.parametrize("layer_budget", ["uniform", "sparsity"])
def test_a_merge_of_ones_own_that_returns_something_else_is_one_line(given, said, layer_budget, registry):
    merging.register_merge("wrong")(lambda kept, *_: given(kept))
    model = FAMILIES["qwen2"].build()
    with (
        kvcompress.compress(model, "snapkv", 0.3, merge="wrong", layer_budget=layer_budget),
        pytest.raises(kvcompress.KVCompressError, match=f"^merge 'wrong' {said}"),
    ):
        generate(model, FAMILIES["qwen2"].inputs(model, [40]), 1)


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_merging_keeps_the_budget_and_changes_the_answer(merge):
    model = FAMILIES["llava-onevision"].build()
    inputs = FAMILIES["llava-onevision"].inputs(model, [60, 40], [1, 0])
    runs = {}
    for name in ("none", merge):
        with kvcompress.compress(model, "snapkv", 0.3, window_size=4, merge=name) as session:
            _, logits = generate(model, inputs, 4)
        kept = [[head.tolist() for head in row] for row in session.cache.kept_indices(0)]
        runs[name] = kept, logits
    assert runs["none"][0] == runs[merge][0]
    assert torch.equal(runs["none"][1][:, 0], runs[merge][1][:, 0]), "the prefill attends over everything"
    assert not torch.allclose(runs["none"][1][:, 1:], runs[merge][1][:, 1:], atol=1e-4)
