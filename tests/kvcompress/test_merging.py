"""Merging of evicted entries against loops in float64, and what it does in a generation."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompress
from kvcompress.merging import MERGES
from tests.families import FAMILIES
from tests.masked_reference import generate

from .test_clusters import layers


def merged_by_hand(keys, values, kept: list[int], merge: str, kind: list[bool] | None) -> tuple:
    """One head: keys and values (tokens, head_dim) of all real tokens; what the kept ones become."""
    groups = {column: [(keys[column], values[column])] for column in kept}
    for column in set(range(len(keys))) - set(kept):
        alike = {
            c: float(torch.nn.functional.cosine_similarity(keys[column], keys[c], dim=0))
            for c in kept
            if kind is None or kind[c] == kind[column]
        }
        if not alike:
            continue
        target = max(alike, key=alike.get)
        pairs = ((keys[column], keys[target]), (values[column], values[target]))
        parts = {
            "average": lambda gone, stays, _: gone,
            "pivot": lambda gone, stays, _: (gone + stays) / 2,
            "weighted": lambda gone, stays, likeness: gone * likeness,
        }
        groups[target].append(tuple(parts[merge](gone, stays, alike[target]) for gone, stays in pairs))
    means = [[sum(part) / len(part) for part in zip(*groups[column], strict=True)] for column in kept]
    return torch.stack([key for key, _ in means]), torch.stack([value for _, value in means])


@settings(max_examples=60, deadline=None)
@given(layer=layers(), merge=st.sampled_from(["average", "pivot", "weighted"]), same=st.booleans(), data=st.data())
def test_every_evicted_entry_goes_into_the_kept_one_with_the_likest_key(layer, merge, same, data):
    queries, keys, values, prompt = layer
    vision = torch.rand(keys.shape[0], keys.shape[2], generator=torch.Generator().manual_seed(1)) < 0.5
    modality = "same" if same else "any"
    prompt = dataclasses.replace(prompt, merge=merge, merge_modality=modality, vision=vision)
    cluster = kvcompress.make_cluster("snapkv", window_size=2)
    plain = cluster.update_kv(queries, keys, values, dataclasses.replace(prompt, merge="none"))
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
    assert torch.equal(runs["none"][1][:, 0], runs[merge][1][:, 0]), "the prompt pass attends over everything"
    assert not torch.allclose(runs["none"][1][:, 1:], runs[merge][1][:, 1:], atol=1e-4)
