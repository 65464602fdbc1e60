"""The promises that hold for every method on every family, over drawn shapes."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import kvcompress
from kvcompress.check.command import failure
from kvcompress.check.promises import (
    CHUNKS,
    DECODING,
    NotAsked,
    a_head_is_scored_by_itself,
    a_row_is_as_alone,
    chooses_the_same_twice,
)
from kvcompress.check.reference import generate, only_attending_to
from kvcompress.layer_budgets import layer_budget, list_layer_budgets
from kvcompress.measure import LargestTensor
from kvcompress.scoring.merging import MERGES
from kvcompress.scoring.rotary import Rotary
from tests import fuzz
from tests.support.calibrations import calibration_of, checked
from tests.support.examples import examples, paired
from tests.support.families import FAMILIES
from tests.support.kept import expected_entries, kept_of, real_lengths
from tests.support.snapshot import snapshot
from tests.support.strategies import METHODS, OPTIONS, Case, cases

NEW = 3
TOLERANCE = 1e-4  # fp32, logits of order 1
property_test = examples(4)


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_ratio_one_gives_the_logits_of_the_unhooked_model_bit_for_bit(family, data):
    case = data.draw(cases(family, data.draw(st.sampled_from([*METHODS, "full", "attention-matching"]))))
    tokens, expected = generate(case.model, case.inputs, NEW)
    with case.compress(ratio=1.0):
        ours, logits = generate(case.model, case.inputs, NEW)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_decoding_equals_the_full_cache_under_a_mask_that_hides_what_was_dropped(family, data):
    case = data.draw(cases(family))
    with case.compress(**case.unmerged) as session:
        tokens, logits = generate(case.model, case.inputs, NEW)
    with only_attending_to(case.model, kept_of(session.cache)):
        _, expected = generate(case.model, case.inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("method", "variant"),
    [
        (name, other)
        for name in sorted({*METHODS} - fuzz.TIED_IN_BATCHES)
        for other in OPTIONS.get(name, {}).get("variant", [])[1:]
    ],
)
def test_a_row_of_another_variant_of_a_method_does_not_depend_on_its_batch(method, variant):
    """Windows of `effivlm` are parts of a budget: here they differ from row to row."""
    assert "rows" in fuzz.check(fuzz.of_rows("qwen2", [60, 21], method, ratio=0.6, variant=variant))


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_every_layer_and_head_stores_exactly_its_budget_in_ascending_columns_of_real_tokens(family, data):
    case = data.draw(cases(family))
    inputs = case.inputs
    with case.compress() as session:
        generate(case.model, inputs, NEW)
    wanted = [expected_entries(case.ratio, length, case.on_top) for length in real_lengths(inputs)]
    decoded = NEW - 1  # the last token is returned, never fed
    columns, kept_per_layer = inputs["input_ids"].shape[1], kept_of(session.cache)
    for kept in kept_per_layer:
        for row, length in zip(kept, real_lengths(inputs), strict=True):
            for head in row:
                assert head.tolist() == sorted(set(head.tolist()))
                assert columns - length <= head.min()
                assert head[-decoded:].tolist() == list(range(columns, columns + decoded))
    if not case.is_uniform:
        for row, n in enumerate(wanted):
            assert sum(len(head) for kept in kept_per_layer for head in kept[row]) == 3 * case.heads[1] * (n + decoded)
        return
    for kept in kept_per_layer:
        if case.is_adaptive:
            assert [sum(map(len, row)) for row in kept] == [case.heads[1] * (n + decoded) for n in wanted]
        else:
            assert [{len(head) for head in row} for row in kept] == [{n + decoded} for n in wanted]
    ratios = [n / length for n, length in zip(wanted, real_lengths(inputs), strict=True)]
    for layer_ratios in session.cache.realised_ratios():
        assert layer_ratios == pytest.approx(ratios)


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_a_row_does_not_depend_on_its_batch_or_padding(family, data):
    case = data.draw(cases(family))
    assume(not case.may_tie)
    inputs = case.inputs
    columns = inputs["input_ids"].shape[1]
    with case.compress() as session:
        tokens, logits = generate(case.model, inputs, NEW)
    batch = kept_of(session.cache)
    for row, length in enumerate(real_lengths(inputs)):
        with case.compress() as session:
            _, alone = generate(case.model, case.family.solo(inputs, row), NEW, forced=tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        for together, solo in zip(batch, kept_of(session.cache), strict=True):
            for a, b in zip(together[row], solo[0], strict=True):
                assert (a - (columns - length)).tolist() == b.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_these_promises_of_kvcompress_check(method):
    """Scores and kept sets of a row are those that it has alone, also where it begins in a later chunk; what
    `mixes_heads` says is true; nothing is remembered from one call to the next."""
    while_decoding, in_chunks = (partial(a_row_is_as_alone, **engine) for engine in (DECODING, CHUNKS))
    for promise in (while_decoding, in_chunks, a_head_is_scored_by_itself, chooses_the_same_twice):
        with suppress(NotAsked):
            assert failure(promise, checked(method)) == ""


@pytest.mark.parametrize("family", ["qwen2", "llava-onevision", "qwen2.5-vl"])
@property_test
@given(data=st.data())
def test_a_second_prompt_sees_what_was_kept_and_is_compressed_in_turn(family, data):
    check_two_turns(data.draw(cases(family, max_batch=1)), data.draw(st.integers(2, 20)))


def test_a_second_prompt_sees_of_each_head_what_that_head_kept():
    check_two_turns(Case(FAMILIES["qwen2"], (6, 2), (30,), None, "adakv", (("window_size", 4),), 0.3, seed=0), 12)


def check_two_turns(case: Case, length: int) -> None:
    """A prompt, an answer, `length` more tokens and another answer."""
    first = case.inputs
    more = torch.randint(8, 128, (1, length), generator=torch.Generator().manual_seed(1))

    def two_turns(model, cache, forced=(None, None)):
        tokens, _ = generate(model, first, NEW, forced[0], past_key_values=cache)
        ids = torch.cat([first["input_ids"], tokens, more], 1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in first:
            second["mm_token_type_ids"] = torch.zeros_like(ids)
            second["mm_token_type_ids"][:, : first["input_ids"].shape[1]] = first["mm_token_type_ids"]
        answer, logits = generate(model, second, NEW, forced[1], past_key_values=cache)
        return (tokens, answer), logits

    with case.compress() as session:
        options = {**dict(case.options), **case.calibration, **case.unmerged}
        cache = kvcompress.CompressedCache(case.model.config, case.method, case.ratio, **options)
        forced, logits = two_turns(case.model, cache)
        assert session.cache is cache
    with only_attending_to(case.model, kept_of(cache)):
        _, expected = two_turns(case.model, DynamicCache(config=case.model.config), forced)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    lengths = [first["input_ids"].shape[1], more.shape[1] + 1]  # the first answer's last token is new here
    kept = sum(layer.memory.log.kept for layer in cache.layers).tolist()
    assert kept == [3 * sum(expected_entries(case.ratio, n, case.on_top) for n in lengths)]


@pytest.mark.parametrize("method", METHODS)
def test_under_autocast_a_method_computes_in_dtypes_of_its_own(method, monkeypatch):
    """Autocast would compute fp32 scores in 16 bits; and it gives keys and values different dtypes."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [30, 24])
    cls, is_autocast = kvcompress.list_methods()[method].cls, []
    keep = cls.keep

    def noting(*args):
        is_autocast.append(torch.is_autocast_enabled("cpu"))
        return keep(*args)

    monkeypatch.setattr(cls, "keep", noting)
    options = {"ratio": 0.3, "decode_ratio": 0.3, "decode_interval": 2, **calibration_of(method, model)}
    with torch.autocast("cpu", torch.bfloat16), kvcompress.compress(model, method, **options) as session:
        generate(model, inputs, NEW)
        next(session.generate_many([{"input_ids": inputs["input_ids"][:1]}], slots=1, max_new_tokens=NEW))
    assert len(is_autocast) >= 4
    assert not any(is_autocast)


@pytest.mark.parametrize(("method", "bad"), paired([*METHODS, *MERGES], [math.nan, math.inf]))
def test_a_row_whose_states_are_not_finite_gets_nan_logits_and_changes_no_other_row(method, bad):
    options = {"method": "snapkv", "merge": method}
    if method not in MERGES:
        options = {"method": method, **calibration_of(method, FAMILIES["qwen2"].build())}
    check_a_row_that_is_not_finite(24, bad, options)


@pytest.mark.parametrize(
    ("rule", "bad"),
    paired(sorted(list_layer_budgets().keys() - {"vision"}), [math.nan, math.inf]),  # text has no vision
)
def test_neither_does_it_where_layers_share_by_what_is_measured_of_rows_without_pads(rule, bad):
    check_a_row_that_is_not_finite(30, bad, {"method": "snapkv", "window_size": 4, "layer_budget": rule})


def check_a_row_that_is_not_finite(length: int, bad: float, options: dict[str, object]) -> None:
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [30, length])
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    embeddings[1, 12] = bad
    logits = []
    for rows in (2, 1):
        prompt = {"inputs_embeds": embeddings[:rows], "attention_mask": inputs["attention_mask"][:rows]}
        with torch.no_grad(), kvcompress.compress(model, ratio=0.3, decode_ratio=0.3, **options) as session:
            model(**prompt)
            positions = torch.tensor([[30], [length]])[:rows]
            tokens = torch.tensor([[20], [21]])[:rows]
            steps = [
                model(tokens, past_key_values=session.cache, position_ids=positions + step).logits for step in range(2)
            ]
        logits.append(torch.stack(steps))
    torch.testing.assert_close(logits[0][:, :1], logits[1], atol=TOLERANCE, rtol=0)
    assert logits[0][:, 1].isnan().all()


@pytest.mark.parametrize(
    ("method", "variant"),
    [
        (name, one)
        for name in METHODS
        for one in OPTIONS.get(name, {}).get("variant", [None])
        if one != "effivlm"  # whose window is a part of the budget, and this of the prompt
    ],
)
@pytest.mark.parametrize("has_image", [False, True])
def test_scoring_memory_is_linear_in_the_prompt(method, variant, has_image):
    """Of a prompt with an image, that is half of it, and a quarter the question."""
    given = calibration_of(method, FAMILIES["qwen2"].build(2))  # two layers of the same heads
    given |= {} if variant is None else {"variant": variant}
    cluster = kvcompress.make_cluster(method, **given)
    assert_linear(lambda states, norms, view: cluster.update_kv(*states, view), 1200 if has_image else 800, has_image)


@pytest.mark.parametrize("rule", [name for name, rule in list_layer_budgets().items() if rule.is_measured])
def test_measuring_a_layer_takes_memory_that_is_linear_in_the_prompt(rule):
    assert_linear(lambda states, norms, view: layer_budget(rule).measure(*states, norms, view), 1200, has_image=True)


def assert_linear(run: Callable, shorter: int, has_image: bool) -> None:
    """Raise AssertionError if twice the prompt makes the largest tensor of `run(states, scores, view)` grow by more."""

    def largest(length: int) -> int:
        generator = torch.Generator().manual_seed(0)
        queries, keys, values = (torch.randn(1, heads, length, 16, generator=generator) for heads in (4, 2, 2))
        module = SimpleNamespace(o_proj=torch.nn.Linear(64, 64))
        angles = torch.ones(1, length, 16)
        rotary = Rotary(angles, angles, torch.arange(length)[None], torch.ones(8))
        columns = torch.arange(length)[None]
        images = {"vision": (columns >= length // 4) & (columns < 3 * length // 4), "frame_tokens": (10,)}
        made = {"row_seeds": (1,), "module": module, "rotary": rotary, **(images if has_image else {})}
        view = kvcompress.Prompt(0, 2, [length], [length // 5], 0.25, **made)
        with LargestTensor() as mode:
            run((queries, keys, values), keys[..., 0], view)
        return mode.numel

    assert largest(2 * shorter) <= 2.1 * largest(shorter)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_untouched_after_the_context_also_after_an_exception(family):
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [12])
    generate(model, inputs, 2)  # transformers itself caches things on first use
    before = snapshot(model)
    with kvcompress.compress(model, "snapkv", 0.5):
        generate(model, inputs, 2)
        assert snapshot(model) != before
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), kvcompress.compress(model, "snapkv", 0.5):
        raise ZeroDivisionError
    assert snapshot(model) == before


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].is_vlm])
def test_the_vision_tower_keeps_its_own_attention(family):
    model = FAMILIES[family].build()
    with kvcompress.compress(model, "snapkv", 0.5):
        assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", METHODS)
def test_a_window_or_sinks_beyond_prompt_and_budget_are_no_error(method):
    model = FAMILIES["qwen2"].build()
    large = {"window_size": 500, "sinks": 500}
    options = {name: large[name] for name in kvcompress.list_methods()[method].options if name in large}
    for ratio, length in ((0.5, 9), (0.1, 9), (0.5, 1)):
        with kvcompress.compress(model, method, ratio, **options, **calibration_of(method, model)) as session:
            generate(model, FAMILIES["qwen2"].inputs(model, [length]), 2)
        kept = [len(head) for layer in kept_of(session.cache) for head in layer[0]]
        assert sum(kept) == len(kept) * (expected_entries(ratio, length) + 1)


@pytest.mark.parametrize(
    ("method", "head_budget"),
    paired(
        [name for name in METHODS if "sinks" in kvcompress.list_methods()[name].options],
        ["uniform", "shared", "adaptive"],
    ),
)
def test_of_sinks_that_the_budget_has_no_room_for_the_first_stay(method, head_budget):
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [40, 33])
    given = {"sinks": 6, "layer_budget": "uniform", "head_budget": head_budget, **calibration_of(method, model)}
    for budget in (1, 2, 3, 5, 6, 7, 9):
        with kvcompress.compress(model, method, budget=budget, **given) as session:
            generate(model, inputs, 1)
        for layer in kept_of(session.cache):
            for row, pads in zip(layer, (0, 7), strict=True):
                for head in row:
                    sinks = [column - pads for column in head.tolist() if column - pads < 6]
                    assert sinks == list(range(len(sinks)))
                    assert sinks or len(head) < 2, "the last token at most goes before the first"


def test_compression_that_cannot_happen_is_an_error_not_a_silent_full_cache():
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [20])
    error = kvcompress.KVCompressError
    with kvcompress.compress(model, "snapkv", 0.5):
        with pytest.raises(error, match="use_cache is off"):
            model.generate(**inputs, use_cache=False, max_new_tokens=2)
        cache = kvcompress.CompressedCache(model.config, "snapkv", 0.5)
        with pytest.raises(error, match="use_cache is off"):
            model.generate(**inputs, past_key_values=cache, use_cache=False, max_new_tokens=2)
        with pytest.raises(error, match="past_key_values is a StaticCache"):
            model.generate(**inputs, past_key_values=StaticCache(model.config, 64), max_new_tokens=2)
        with pytest.raises(error, match="2-D attention mask"):
            model(input_ids=inputs["input_ids"], attention_mask=torch.ones(1, 20, 20, dtype=torch.bool))
        with pytest.raises(error, match="not left-padded"):
            model(input_ids=inputs["input_ids"], attention_mask=torch.arange(20)[None] < 15)
        with pytest.raises(error, match="already being compressed"), kvcompress.compress(model, "knorm", 0.5):
            pass
    cache = kvcompress.CompressedCache(model.config, "snapkv", 0.5)
    with pytest.raises(error, match="only where the model itself is called inside kvcompress"):
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2)
    with kvcompress.attach(model), pytest.raises(error, match="pass past_key_values"):
        model.generate(**inputs, max_new_tokens=2)


def test_options_that_tests_draw_exist_and_cover_every_option():
    for name in METHODS:
        assert set(OPTIONS.get(name, {})) == set(kvcompress.list_methods()[name].options) - {"calibration"}, name
