"""Attention Matching keeps keys with a bias and fitted values, whatever stores them, and attends as that says."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.check.reference import generate, keys_of, only_attending_to
from kvcompress.clusters.attention_matching import AttentionMatchingKVCluster
from kvcompress.hooks.model import text_decoder, unwrapped
from kvcompress.scoring.layer_view import LayerView
from kvcompress.train.watching import attention_by
from tests.support.examples import examples
from tests.support.families import FAMILIES
from tests.support.in_flight import check_in_flight
from tests.support.kept import kept_of
from tests.support.strategies import cases

METHOD, NEW, TOLERANCE = "attention-matching", 4, 1e-4
ALONE = {"bias": "none", "values": "own"}  # eviction alone
QWEN2 = FAMILIES["qwen2"]
STORAGES = [
    {},
    {"cache_implementation": "static", "max_new_tokens": 32},
    {"cache_implementation": "offloaded"},
    {"cache_implementation": "offloaded_static", "max_new_tokens": 32},
]


def drawn_options(data):
    heads = data.draw(st.sampled_from([{}, {"head_budget": "adaptive"}, {"head_budget": "shared"}]))
    layers = data.draw(st.sampled_from(["uniform", "pyramid"]))
    fixed = {"layer_budget": layers, "merge": "none", "merge_modality": "any"}
    return {**heads, **fixed, "references": data.draw(st.sampled_from([7, 100_000]))}


@pytest.mark.parametrize("family", FAMILIES)
@examples(2)
@given(data=st.data())
def test_with_neither_part_it_decodes_as_the_full_cache_under_a_mask_that_hides_what_was_dropped(family, data):
    case = data.draw(cases(family, METHOD))
    with case.compress(**ALONE, **drawn_options(data)) as session:
        tokens, logits = generate(case.model, case.inputs, NEW)
    with only_attending_to(case.model, kept_of(session.cache)):
        _, expected = generate(case.model, case.inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@examples(2)
@given(data=st.data())
def test_storages_heads_and_batches_do_not_change_the_logits(family, data):
    case, asked = data.draw(cases(family, METHOD)), drawn_options(data)
    with case.compress(**asked):
        tokens, expected = generate(case.model, case.inputs, NEW)
    for storage in STORAGES[1:]:
        with case.compress(**asked, **storage):
            _, logits = generate(case.model, case.inputs, NEW, forced=tokens)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    if asked["references"] > 7:  # thinned-out queries of one row are others than those of a batch's
        with case.compress(**asked):
            _, logits = generate(case.model, case.family.solo(case.inputs, 0), NEW, forced=tokens[:1])
        torch.testing.assert_close(logits[0], expected[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("family", "heads"), [("qwen2", "uniform"), ("llava-onevision", "adaptive")])
def test_a_step_adds_the_bias_of_each_key_to_its_logits(family, heads):
    """The reference is plain attention over what the cache says that it holds."""
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [60])
    with kvcompress.compress(model, METHOD, 0.3, head_budget=heads) as session:
        tokens, logits = generate(model, inputs, NEW)
    held = [layer.storage.read() for layer in session.cache.compressed_layers]
    hidden = [layer.storage.visible() for layer in session.cache.compressed_layers]
    assert all(keys.shape[-1] == values.shape[-1] + 1 for keys, values in held)
    assert all(bool(keys[..., -1].abs().max() > 0.1) for keys, _ in held)
    prompt = inputs["input_ids"].shape[1]

    def attention(attend, module, query, key, value, mask, scaling, **kwargs):
        layer = keys_of(module)
        bias = torch.zeros(key.shape[:3])
        if key.shape[2] > prompt:  # behind the prompt: what the cache holds of it, and the tokens since
            new, (keys, values) = key.shape[2] - prompt, held[layer]
            of_prompt = keys.shape[2] - (NEW - 1)  # NEW - 1 tokens were fed
            key = torch.cat([keys[:, :, :of_prompt, :-1], key[:, :, -new:]], 2)
            value = torch.cat([values[:, :, :of_prompt], value[:, :, -new:]], 2)
            bias = torch.nn.functional.pad(keys[:, :, :of_prompt, -1], (0, new))
            if hidden[layer] is not None:
                unused = ~hidden[layer].expand(*keys.shape[:3])[..., :of_prompt]
                bias[..., :of_prompt] = bias[..., :of_prompt].masked_fill(unused, -torch.inf)
        groups = query.shape[1] // key.shape[1]
        products = query @ key.repeat_interleave(groups, 1).mT * scaling + bias.repeat_interleave(groups, 1)[:, :, None]
        if query.shape[2] > 1:
            products = products.masked_fill(torch.ones(products.shape[-2:]).triu(1).bool(), -torch.inf)
        return (products.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2), None

    with attention_by(text_decoder(unwrapped(model)), attention):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def drawn(seed, columns=60, kv_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(1, 2 * kv_heads, columns, head_dim, generator=generator)
    keys, values = (torch.randn(1, kv_heads, columns, head_dim, generator=generator) for _ in range(2))
    return queries, torch.nn.functional.pad(keys, (0, 1)), values


def errors(cluster, seed, budget):
    """How far attention to what is kept is from attention to all, by the reference queries: outputs, and masses."""
    queries, keys, values = drawn(seed)
    kept = cluster.update_kv(queries, keys, values, LayerView(0, 1, [60], [budget], 8**-0.5))
    asked = queries.reshape(2, -1, 8)
    full = asked @ keys[0, ..., :-1].mT * 8**-0.5
    ours = asked @ kept.keys[0, ..., :-1].mT * 8**-0.5 + kept.keys[0, :, None, :, -1]
    outputs = (ours.softmax(-1) @ kept.values[0] - full.softmax(-1) @ values[0]).square().mean()
    highest = full.amax(-1, keepdim=True)
    masses = ((ours - highest).exp().sum(-1) - (full - highest).exp().sum(-1)).square().mean()
    return float(outputs), float(masses)


@pytest.mark.parametrize("budget", [4, 15, 30, 50])
def test_each_fit_is_nearer_to_attention_to_all(budget):
    for seed in range(5):
        found = {
            (bias, values): errors(AttentionMatchingKVCluster(bias=bias, values=values), seed, budget)
            for bias, values in itertools.product(("fitted", "none"), ("fitted", "own"))
        }
        for bias in ("fitted", "none"):
            assert found[bias, "fitted"][0] < 0.9 * found[bias, "own"][0]
        assert found["fitted", "own"][1] < 0.9 * found["none", "own"][1]


def test_a_fitted_value_that_fp16_cannot_hold_becomes_the_largest_that_it_can():
    """Infinity would make every later answer NaN. Here a value is fitted to a key that hardly any query attends to."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, 120, 16, generator=generator) for heads in (2, 1, 1))
    cluster, view = kvcompress.make_cluster(METHOD), kvcompress.LayerView(0, 1, [120], [20], 0.25)
    states = [part.half() for part in (queries, cluster.as_stored(keys), 5000 * values)]
    as_fp32 = cluster.update_kv(*(part.float() for part in states), view).values
    most = torch.finfo(torch.float16).max
    assert as_fp32.abs().max() > most
    assert torch.equal(cluster.update_kv(*states, view).values, as_fp32.clamp(-most, most).half())


def test_second_prompts_beams_and_files_keep_the_biases(tmp_path):
    model = QWEN2.build()
    inputs, more = QWEN2.inputs(model, [40, 23]), QWEN2.inputs(model, [12, 12], seed=1)
    with kvcompress.compress(model, METHOD, 0.3, head_budget="adaptive") as session:
        tokens, _ = generate(model, inputs, NEW)
        biases = [layer.storage.read()[0][..., -1].clone() for layer in session.cache.compressed_layers]
        session.cache.save(tmp_path / "cache")
        loaded = kvcompress.CompressedCache.load(tmp_path / "cache", model)
        ids = torch.cat([inputs["input_ids"], tokens, more["input_ids"]], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, : -inputs["input_ids"].shape[1]])], 1)
        second = {"input_ids": ids, "attention_mask": mask}
        answers = []
        for cache in (session.cache, loaded):
            with session.reuse(cache):
                answers.append(generate(model, second, NEW, past_key_values=cache)[1])
            for layer, known in zip(cache.compressed_layers, biases, strict=True):
                assert torch.equal(layer.storage.read()[0][..., -1], known)
        beams = {"max_new_tokens": NEW, "num_beams": 2, "do_sample": False}
        found = model.generate(**inputs, **beams)[:, inputs["input_ids"].shape[1] :]
        alone = [model.generate(**QWEN2.solo(inputs, row), **beams)[0, -NEW:] for row in range(2)]
    assert torch.equal(*answers)
    assert torch.equal(found, torch.stack(alone))


def test_requests_in_flight_and_known_prefixes_are_as_alone():
    model = QWEN2.build()
    requests = [QWEN2.inputs(model, [length]) for length in (40, 23, 31)]
    for heads in ("uniform", "adaptive"):
        check_in_flight(model, requests, [4, 6, 3], METHOD, 2, ratio=0.3, tolerance=1e-3, head_budget=heads)
    prefixes = kvcompress.PrefixCache(gb=1)
    for method in (METHOD, "snapkv", METHOD):  # keys of others have no channel for a bias
        with kvcompress.compress(model, method, 0.3):
            _, expected = generate(model, requests[0], NEW)
        with kvcompress.compress(model, method, 0.3, prefix_cache=prefixes):
            _, logits = generate(model, requests[0], NEW)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    assert prefixes.reused_tokens
