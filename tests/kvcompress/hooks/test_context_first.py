"""`scope="context-first"`: a context is compressed before its question passes through the model, once for all."""

import pytest
import torch

import kvcompress
from kvcompress import KVCompressError, PrefixCache
from kvcompress.hooks.shared_prompt import SharedPrompt
from tests.support import answers
from tests.support.answers import assert_same
from tests.support.calibrations import calibration_of
from tests.support.examples import some
from tests.support.families import FAMILIES, sliding_model
from tests.support.in_flight import with_end
from tests.support.kept import kept_of
from tests.support.strategies import METHODS, SOME_METHODS

NEW, ASKS = 4, 6
QWEN2, QWEN2_VL = FAMILIES["qwen2"], FAMILIES["qwen2-vl"]
FIRST = {"scope": "context-first", "context_tokens": -ASKS}
ANSWERED = [name for name in METHODS if name != "hindsight"]


def answer(model, inputs, method, prefixes=None, ratio=0.4, **options) -> answers.Answer:
    return answers.answer(model, inputs, method, ratio, NEW, prefix_cache=prefixes, **{**FIRST, **options})


def in_two_steps(model, inputs, method, ratio=0.4, **options):
    """The same by hand: the context alone, and then its question on the compressed cache."""
    whole = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    context = {name: value[:, :-ASKS] for name, value in whole.items()}
    media = {name: value for name, value in inputs.items() if name not in whole and name != "mm_token_type_ids"}
    if "mm_token_type_ids" in inputs:
        media["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, :-ASKS]
    columns = context["input_ids"].shape[1]
    # Later prompts are kept whole with `context_tokens=`.
    options |= {"scope": "context", "context_tokens": columns} | calibration_of(method, model)
    with kvcompress.compress(model, method, ratio, **options) as session, torch.no_grad():
        model(**context, **media)
        with session.reuse() as cache:
            logits = model(input_ids=inputs["input_ids"][:, -ASKS:], past_key_values=cache, logits_to_keep=1).logits
            kept = [cache.kept_indices(layer.layer_idx) for layer in cache.compressed_layers]
    return logits[:, -1], kept


@pytest.mark.parametrize("family", ["qwen2", "llava-onevision", "qwen2-vl", "qwen3-vl", "internvl", "llama"])
@pytest.mark.parametrize("method", ["snapkv", "kvzip", "random"])
def test_it_keeps_and_answers_what_two_steps_by_hand_do(family, method):
    made = FAMILIES[family]
    model = made.build()
    inputs = made.inputs(model, [64], [1] if made.is_vlm else None)
    _, logits, cache = answer(model, inputs, method)
    expected, kept = in_two_steps(model, inputs, method)
    torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=0)
    asked = inputs["input_ids"].shape[1]
    for layer, wanted in zip(cache.compressed_layers, kept, strict=True):
        for ours, theirs in zip(cache.kept_indices(layer.layer_idx)[0], wanted[0], strict=True):
            assert torch.equal(ours[ours < asked], theirs)


@pytest.mark.parametrize("method", some(ANSWERED, SOME_METHODS))
def test_what_is_kept_of_a_context_answers_its_next_question_to_the_bit(method):
    model = QWEN2_VL.build()
    inputs, prefixes = QWEN2_VL.inputs(model, [61], [1]), PrefixCache(gb=1)
    answer(model, with_end(inputs, ASKS), method, prefixes)
    for seed in (2, 3):
        asked = with_end(inputs, ASKS, seed)
        assert_same(answer(model, asked, method, prefixes), answer(model, asked, method))
    tokens = inputs["input_ids"].shape[1] - ASKS
    is_shared = answer(model, inputs, method)[2].policy.tokens is None
    assert prefixes.reused_tokens == (2 * tokens if is_shared else 0)


@pytest.mark.parametrize("lengths", [[63], [40, 63]], ids=["one row", "padded"])
@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static"])
def test_a_question_on_a_whole_context_is_answered_alike_by_every_storage(kind, lengths):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, lengths)
    expected = answer(model, inputs, "knorm", ratio=1.0)
    ours = answer(model, inputs, "knorm", ratio=1.0, cache_implementation=kind, max_new_tokens=ASKS + NEW)
    torch.testing.assert_close(ours[1], expected[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen2-vl"])
def test_a_context_of_one_token_is_known_again(family):
    made, prefixes = FAMILIES[family], PrefixCache(gb=1)
    model = made.build()
    inputs = made.inputs(model, [ASKS + 1, 40])
    for _ in range(2):
        assert_same(answer(model, inputs, "snapkv", prefixes), answer(model, inputs, "snapkv"))
    assert prefixes.reused_tokens == 1 + 40 - ASKS


def test_a_context_with_other_pads_is_another():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [40])
    padded = {name: torch.nn.functional.pad(part, (4, 0)) for name, part in inputs.items()}
    for given in (inputs, padded):
        assert_same(answer(model, given, "snapkv", prefixes), answer(model, given, "snapkv"), 1e-4)


def test_a_cleared_cache_has_all_of_its_room():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [63])
    answer(model, inputs, "knorm", prefixes)
    prefixes.clear()
    assert prefixes.nbytes == 0
    assert prefixes._tree.room == 2**30


@pytest.mark.parametrize(("device", "holds"), [(None, True), ("cpu", True), ("cpu:1", False)])
def test_what_is_kept_of_a_context_fills_no_other_device_than_the_one_that_was_named(device, holds):
    model, prefixes = QWEN2.build(), PrefixCache(gb=1, device=device)
    inputs = QWEN2.inputs(model, [63])
    for _ in range(2):
        assert_same(answer(model, inputs, "knorm", prefixes), answer(model, inputs, "knorm"), 1e-5)
    assert (prefixes._contexts.nbytes > 0) == holds


def test_the_question_changes_nothing_that_is_kept_of_its_context():
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [40, 63])
    one, other = (answer(model, with_end(inputs, ASKS, seed), "snapkv")[2] for seed in (1, 2))
    for row, pads in enumerate((23, 0)):
        for ours, theirs in zip(one.kept_indices(0)[row], other.kept_indices(0)[row], strict=True):
            assert torch.equal(ours, theirs)
            asked = ours >= 63 - ASKS
            assert int((~asked).sum()) == round(0.4 * (63 - pads - ASKS))


@pytest.mark.parametrize("options", [{"protect": "last:8"}, {"fair": "first:20+last:12"}], ids=["protect", "fair"])
def test_a_context_is_not_taken_for_one_of_which_a_shorter_question_protects_more(options):
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    options |= {"context_tokens": 30}
    for length in (42, 34, 42):
        inputs = QWEN2.inputs(model, [42])
        inputs = {name: value[:, :length] for name, value in inputs.items()}
        before = prefixes.reused_tokens
        ours, expected = (answer(model, inputs, "knorm", *known, **options) for known in ([prefixes], []))
        assert repr(kept_of(ours[2])) == repr(kept_of(expected[2]))
        torch.testing.assert_close(ours[1], expected[1], atol=1e-5, rtol=0)
    assert prefixes.reused_tokens - before == 30, "the third is the first's"


def test_methods_share_the_states_of_a_context_and_others_its_entries():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [63])
    answer(model, inputs, "snapkv", prefixes)
    expected = answer(model, inputs, "knorm")
    ours = answer(model, inputs, "knorm", prefixes)
    assert torch.equal(ours[0], expected[0])
    assert prefixes.reused_tokens == 63 - ASKS - 1  # as a prompt that ends there
    answer(model, inputs, "knorm", prefixes, ratio=0.2)
    answer(model, inputs, "knorm", prefixes)
    assert prefixes.reused_tokens == 3 * (63 - ASKS) - 2


def test_entries_stay_where_states_do_not_fit():
    """Of a whole context there are queries, keys and values, of a compressed one a tenth of the keys and values."""
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [63])
    prefixes = PrefixCache(gb=1)
    answer(model, inputs, "knorm", prefixes, ratio=0.1)
    entries = prefixes._contexts.nbytes
    assert entries < prefixes.nbytes / 4
    prefixes = PrefixCache(gb=(2 * entries + 1) / 2**30)
    contexts = [QWEN2.inputs(model, [63], seed=seed) for seed in (1, 2, 3)]
    for one in contexts:
        answer(model, one, "knorm", prefixes, ratio=0.1)
        assert prefixes.nbytes <= 2 * entries + 1
    before = prefixes.reused_tokens
    answer(model, contexts[2], "knorm", prefixes, ratio=0.1)
    assert prefixes.reused_tokens == before + 63 - ASKS
    answer(model, contexts[0], "knorm", prefixes, ratio=0.1)  # the first has left
    assert prefixes.reused_tokens == before + 63 - ASKS


def test_layers_that_slide_go_on_from_a_known_context():
    model, prefixes = sliding_model("sliding", "full", "sliding"), PrefixCache(gb=1)
    prompts = [with_end(QWEN2.inputs(model, [63]), ASKS, seed) for seed in (1, 2)]
    for prompt in prompts:
        assert_same(answer(model, prompt, "snapkv", prefixes), answer(model, prompt, "snapkv"))
    assert prefixes.reused_tokens == 63 - ASKS


@pytest.mark.parametrize(
    ("method", "ratio"), [("tgv-kv", 0.4), ("prefixkv", 0.4), ("snapkv:d2o", 0.4), ("tgv-kv", 1.0), ("prefixkv", 1.0)]
)
def test_what_a_choice_left_for_evictions_while_decoding_outlives_the_question(method, ratio):
    name, _, merge = method.partition(":")
    model, found = QWEN2.build(), []
    inputs = QWEN2.inputs(model, [63])
    options = {"decode_budget": 40, **({"merge": merge} if merge else {})}
    context = {each: part[:, :-ASKS] for each, part in inputs.items()}
    for prompt, scope in ((context, {}), (inputs, FIRST)):
        with kvcompress.compress(model, name, ratio, **options, **scope) as session, torch.no_grad():
            model(**prompt)
        found.append([(layer.memory.noted, layer.memory.merge_threshold) for layer in session.cache.layers])
    for alone, asked in zip(*found, strict=True):
        assert any(part is not None for part in alone)
        for expected, ours in zip(alone, asked, strict=True):
            assert (expected is None) == (ours is None)
            assert expected is None or torch.equal(expected, ours)


def test_a_shared_prefill_is_not_taken_for_it():
    model, known = QWEN2.build(), None
    inputs = QWEN2.inputs(model, [63])
    for scope in ("context", "context-first"):
        with SharedPrompt(model, known) as shared:
            ours = answer(model, inputs, "snapkv", scope=scope)
        assert not shared.is_known
        assert_same(ours, answer(model, inputs, "snapkv", scope=scope))
        known = known or shared.prompt_pass


def test_an_error_in_the_question_leaves_the_context_usable():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [63])
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, kwargs: 1 / 0 if (args or [kwargs["hidden_states"]])[0].shape[1] == ASKS else None,
        with_kwargs=True,
    )
    with pytest.raises(ZeroDivisionError):
        answer(model, inputs, "snapkv", prefixes)
    handle.remove()
    assert_same(answer(model, inputs, "snapkv", prefixes), answer(model, inputs, "snapkv"))
    assert prefixes.reused_tokens == 63 - ASKS


def test_a_request_in_flight_gets_the_same_tokens():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    prompts = [with_end(QWEN2.inputs(model, [length]), ASKS, seed) for length in (63, 40) for seed in (1, 2)]
    expected = [answer(model, prompt, "snapkv").tokens[0, -NEW:].tolist() for prompt in prompts]
    with kvcompress.compress(model, "snapkv", 0.4, prefix_cache=prefixes, **FIRST) as session:
        found = list(session.generate_many(prompts, slots=2, prefill_tokens=16, max_new_tokens=NEW, do_sample=False))
    assert [one.tokens.tolist() for one in sorted(found, key=lambda one: one.index)] == expected
    # The second context begins the first, whose states are known.
    assert prefixes.reused_tokens == 57 + 33 + 34


def test_questions_of_unequal_length_in_a_batch_are_one_line():
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [40, 63])
    with pytest.raises(KVCompressError, match="their questions have 20, 43 tokens: pass them one by one"):
        answer(model, inputs, "snapkv", context_tokens=20)
