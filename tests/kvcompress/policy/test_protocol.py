"""What is compressed (`scope`), what the ratio counts (`ratio_of`), when it takes hold (`first_token`), reuse."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache

import kvcompress
from kvcompress.check.reference import generate, only_attending_to
from tests.support.calibrations import calibration_of
from tests.support.examples import examples, paired, some
from tests.support.families import FAMILIES, IMAGE, VLM_FAMILIES
from tests.support.kept import expected_entries, kept_of, real_lengths
from tests.support.strategies import METHODS, SOME_METHODS, cases

NEW = 3
TOLERANCE = 1e-4
property_test = examples(3)


def with_images(case):
    """The same case with at least one image in every row."""
    images = case.images or (0,) * len(case.lengths)
    return dataclasses.replace(case, images=tuple(min(max(count, 1), 2) for count in images))


def last_image_column(inputs: dict) -> list[int]:
    return [int(torch.nonzero(row == IMAGE)[-1]) for row in inputs["input_ids"]]


@pytest.mark.parametrize("family", VLM_FAMILIES)
@property_test
@given(data=st.data())
def test_decoding_after_scope_context_equals_the_masked_full_cache(family, data):
    case = with_images(data.draw(cases(family)))
    ratio_of = data.draw(st.sampled_from(["prompt", "vision"]))
    with case.compress(scope="context", ratio_of=ratio_of, **case.unmerged) as session:
        tokens, logits = generate(case.model, case.inputs, NEW)
    with only_attending_to(case.model, kept_of(session.cache)):
        _, expected = generate(case.model, case.inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llava-onevision", "qwen2.5-vl"])
@property_test
@given(data=st.data())
def test_scope_context_keeps_the_question_and_the_budget_of_the_context(family, data):
    case = with_images(data.draw(cases(family)))
    inputs = case.inputs
    columns = inputs["input_ids"].shape[1]
    with case.compress(scope="context") as session:
        generate(case.model, inputs, 1)
    for row, (end, length) in enumerate(zip(last_image_column(inputs), real_lengths(inputs), strict=True)):
        heads = [head for kept in kept_of(session.cache) for head in kept[row]]
        assert all(head[head > end].tolist() == list(range(end + 1, columns)) for head in heads)
        context = end + 1 - (columns - length)
        of_context = sum(int((head <= end).sum()) for head in heads)
        assert of_context == 3 * case.heads[1] * expected_entries(case.ratio, context, case.on_top)


# hindsight looks at the answer, which the question changes.
@pytest.mark.parametrize("method", some([name for name in METHODS if name != "hindsight"], [*SOME_METHODS, "random"]))
def test_the_question_does_not_steer_what_scope_context_keeps(method):
    family = FAMILIES["llava-onevision"]
    model = family.build()
    inputs = family.inputs(model, [60], [1])
    options = {"window_size": 4} if method in ("snapkv", "adakv") else {}
    options |= {"window_size": 0} if method == "random" else {}
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    end = last_image_column(inputs)[0]
    other["input_ids"][0, end + 2 :] = inputs["input_ids"][0, end + 2 :].flip(0)
    kept = {}
    for scope in ("prompt", "context"):
        for question in (inputs, other):
            with kvcompress.compress(
                model, method, 0.3, scope=scope, **options, **calibration_of(method, model)
            ) as session:
                generate(model, question, 1)
            of_context = [head[head <= end].tolist() for head in session.cache.kept_indices(1)[0]]
            kept.setdefault(scope, []).append(of_context)
    assert kept["context"][0] == kept["context"][1]
    if options and method != "random":
        assert kept["prompt"][0] != kept["prompt"][1]


@pytest.mark.parametrize("family", ["llava-onevision", "qwen3-vl"])
@pytest.mark.parametrize("scope", ["prompt", "context"])
@property_test
@given(data=st.data())
def test_ratio_of_vision_evicts_only_vision_tokens(family, scope, data):
    case = data.draw(cases(family))
    case = with_images(case) if scope == "context" else case
    inputs = case.inputs
    with case.compress(ratio_of="vision", scope=scope) as session:
        generate(case.model, inputs, 1)
    real = inputs["attention_mask"].bool()
    image = inputs["input_ids"] == IMAGE
    for row in range(len(image)):
        images = int(image[row].sum())
        text = set(torch.nonzero(real[row] & ~image[row]).flatten().tolist())
        heads = [head for kept in kept_of(session.cache) for head in kept[row]]
        assert all(text <= set(head.tolist()) for head in heads)
        vision = sum(len(head) - len(text) for head in heads)
        assert vision == 3 * case.heads[1] * (expected_entries(case.ratio, images) if images else 0)


def test_an_explicit_context_and_a_missing_one():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [50, 30])
    with kvcompress.compress(model, "snapkv", 0.2, scope="context", context_tokens=20) as session:
        generate(model, inputs, 1)
    kept = session.cache.kept_indices(0)
    assert [len(head) for head in kept[0]] == [4 + 30] * 2
    assert [len(head) for head in kept[1]] == [4 + 10] * 2
    with kvcompress.compress(model, "snapkv", 0.2, scope="context", context_tokens=-10) as session:
        generate(model, inputs, 1)
    assert [len(row[0]) for row in session.cache.kept_indices(0)] == [8 + 10, 4 + 10]
    with (
        kvcompress.compress(model, "snapkv", 0.2, scope="context"),
        pytest.raises(kvcompress.KVCompressError, match="row 0 has no image or video token"),
    ):
        generate(model, inputs, 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_without_a_context_is_kept_beside_another(method):
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [1, 12])
    given = {"scope": "context", "context_tokens": -3, **calibration_of(method, model)}
    with kvcompress.compress(model, method, 0.3, **given) as session:
        _, logits = generate(model, inputs, 1)
    assert torch.isfinite(logits).all()
    assert all(head.numel() for head in session.cache.kept_indices(0)[0])


def test_ratio_of_vision_counts_the_vision_tokens_of_an_explicit_context_only():
    family = FAMILIES["qwen2-vl"]
    model = family.build()
    inputs = family.inputs(model, [50], [2])
    context = 10  # ends inside the first image: 3 tokens of text, a mark, 6 of its 12 tokens
    with kvcompress.compress(
        model, "knorm", 0.5, scope="context", context_tokens=context, ratio_of="vision"
    ) as session:
        generate(model, inputs, 1)
    assert [len(head) for head in session.cache.kept_indices(0)[0]] == [50 - 3] * 2


@pytest.mark.parametrize("family", ["qwen2", "llava-onevision", "qwen2.5-vl"])
@property_test
@given(data=st.data())
def test_first_token_compressed_feeds_the_last_prompt_token_on_what_was_kept(family, data):
    case = data.draw(cases(family))
    inputs = case.inputs
    assume(min(real_lengths(inputs)) > 1)
    with case.compress(first_token="compressed", **case.unmerged) as session:
        tokens, logits = generate(case.model, inputs, NEW)
    columns = inputs["input_ids"].shape[1]
    per_token = {"input_ids", "attention_mask", "mm_token_type_ids"}
    before = {name: t[:, :-1] if name in per_token else t for name, t in inputs.items()}
    cache = DynamicCache(config=case.model.config)
    generate(case.model, before, 1, past_key_values=cache)  # a prefill with the positions of a padded batch
    rest = {name: t for name, t in inputs.items() if name in per_token}
    with only_attending_to(case.model, kept_of(session.cache)):
        _, expected = generate(case.model, rest, NEW, forced=tokens, past_key_values=cache)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert session.cache.seen_tokens == columns + NEW - 1


def test_first_token_compressed_is_felt_by_the_first_token():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [60])
    _, full = generate(model, inputs, 1)
    for protocol, same in (("full", True), ("compressed", False)):
        with kvcompress.compress(model, "streamingllm", 0.1, first_token=protocol):
            _, logits = generate(model, inputs, 1)
        assert torch.equal(logits, full) is same


REUSED = paired(METHODS, [{"decode_budget": 15, "decode_interval": 1}, {}])


@pytest.mark.parametrize(("method", "options"), some(REUSED, SOME_METHODS))
def test_each_question_about_a_reused_context_is_as_if_it_were_the_first(method, options):
    family = FAMILIES["llava-onevision"]
    model = family.build()
    context = family.inputs(model, [40], [1])
    questions = [torch.randint(8, 128, (1, n), generator=torch.Generator().manual_seed(n)) for n in (4, 9)]

    def ask(question, cache):
        ids = torch.cat([context["input_ids"], question], 1)
        return generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 6, past_key_values=cache)

    alone = []
    for question in questions:
        with kvcompress.compress(model, method, 0.3, **options, **calibration_of(method, model)) as session:
            model(**context)
            alone.append(ask(question, session.cache)[1])
    with kvcompress.compress(model, method, 0.3, **options, **calibration_of(method, model)) as session:
        model(**context)
        held = [[head.tolist() for head in session.cache.kept_indices(layer)[0]] for layer in range(3)]
        keys = [layer.storage.read()[0].clone() for layer in session.cache.layers]
        for question, expected in zip(questions, alone, strict=True):
            with session.reuse() as cache:
                assert torch.equal(ask(question, cache)[1], expected)
            assert [[h.tolist() for h in session.cache.kept_indices(layer)[0]] for layer in range(3)] == held
            assert session.cache.seen_tokens == context["input_ids"].shape[1]
        for layer, before in zip(session.cache.layers, keys, strict=True):
            assert torch.equal(layer.storage.read()[0], before)


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "quantized", "think"])
@pytest.mark.parametrize("count", [1, 6])
def test_reuse_leaves_every_storage_as_it_was(kind, count):
    """A question of one token is appended to the kept entries, a longer one is a prompt of its own."""
    family = FAMILIES["llava-onevision"]
    model = family.build()
    context = family.inputs(model, [40], [1])
    quantized = {"kv_backend": "hqq", "kv_bits": 8, "kv_group_size": 16, "kv_residual": 4}
    options = {"cache_implementation": kind, **(quantized if kind == "quantized" else {})}

    def ask(token: int) -> torch.Tensor:
        ids = torch.cat([context["input_ids"], torch.full((1, count), token)], 1)
        with session.reuse() as cache:
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            return generate(model, inputs, 8, past_key_values=cache)[1]

    with kvcompress.compress(model, "snapkv", 0.3, max_new_tokens=30, window_size=4, **options) as session:
        model(**context)
        held = [[head.tolist() for head in layer[0]] for layer in kept_of(session.cache)]
        first, other = ask(50), ask(60)
        assert not torch.allclose(first, other, atol=1e-3)
        assert torch.equal(ask(50), first)
        assert [[head.tolist() for head in layer[0]] for layer in kept_of(session.cache)] == held
        assert session.cache.seen_tokens == context["input_ids"].shape[1]


def test_reuse_before_a_prompt_is_an_error():
    with (
        kvcompress.compress(FAMILIES["qwen2"].build(), "snapkv", 0.3) as session,
        pytest.raises(kvcompress.KVCompressError, match="nothing to reuse"),
        session.reuse(),
    ):
        pass
