"""Prompts that begin alike are prefilled once: same tokens, same kept sets, whatever the method looks at."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress import PrefixCache
from kvcompress.errors import KVCompressError
from tests.support import answers
from tests.support.examples import examples, some
from tests.support.families import FAMILIES, sliding_model
from tests.support.in_flight import with_end
from tests.support.strategies import METHODS, SOME_METHODS, cases

NEW, TOLERANCE = 4, 1e-4
QWEN2, ONEVISION, QWEN2_VL = (FAMILIES[name] for name in ("qwen2", "llava-onevision", "qwen2-vl"))


assert_same = partial(answers.assert_same, tolerance=TOLERANCE)


def answer(model, inputs, method=None, ratio=None, prefixes=None, **options) -> answers.Answer:
    return answers.answer(model, inputs, method, ratio, NEW, prefix_cache=prefixes, **options)


def changes_prefill(policy):
    return policy.tokens is not None or policy.cluster.second_pass or policy.cluster.reads_hidden


@pytest.mark.parametrize("family", FAMILIES)
@examples(2)
@given(data=st.data())
def test_a_prompt_that_begins_as_others_did_keeps_and_answers_what_it_does_alone(family, data):
    """A thousand cases: `EXAMPLES=36 pytest tests/kvcompress/hooks/test_prefix_cache.py -k begins_as_others`."""
    case = data.draw(cases(family).filter(lambda case: not case.may_tie))
    model, inputs = case.model, case.inputs
    first = with_end(inputs, data.draw(st.integers(1, 9)))
    if data.draw(st.booleans()):
        first = case.family.solo(first, data.draw(st.integers(0, len(inputs["input_ids"]) - 1)))
    prefixes = PrefixCache(gb=1)
    answer(model, first, prefixes=prefixes)
    before = prefixes.reused_tokens
    expected = answer(model, inputs, case.method, case.ratio, **dict(case.options))
    for _ in range(2):  # the second time all but the last token is known
        assert_same(answer(model, inputs, case.method, case.ratio, prefixes, **dict(case.options)), expected)
    shares = len(expected[2].compressed_layers) == len(expected[2].layers) and not changes_prefill(case.policy)
    reused = prefixes.reused_tokens - before
    assert reused >= int(inputs["attention_mask"].sum()) - len(inputs["input_ids"]) if shares else reused == 0


@pytest.mark.parametrize("method", some(METHODS, SOME_METHODS))
def test_every_method_sees_the_whole_prompt_and_leaves_what_is_shared_as_it_was(method):
    model = ONEVISION.build()
    inputs, prefixes = ONEVISION.inputs(model, [61, 44], [1, 0]), PrefixCache(gb=1)
    answer(model, with_end(inputs, 5), prefixes=prefixes)
    for seed in (2, 3):
        asked = with_end(inputs, 5, seed)
        expected = answer(model, asked, method, 0.3)
        assert_same(answer(model, asked, method, 0.3, prefixes), expected)
    shared = 2 * (61 - 5 + 44 - 5)
    assert prefixes.reused_tokens == (0 if changes_prefill(expected[2].policy) else shared)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree_and_do_not_share(attention):
    model, prefixes = copy.deepcopy(QWEN2.build()), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [40, 63])
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        if implementation != attention:
            answer(model, inputs, prefixes=prefixes)
    model.set_attn_implementation(attention)
    expected = answer(model, inputs, "snapkv", 0.4)
    assert_same(answer(model, inputs, "snapkv", 0.4, prefixes), expected)
    assert prefixes.reused_tokens == 0
    assert_same(answer(model, inputs, "snapkv", 0.4, prefixes), expected)
    assert prefixes.reused_tokens == 40 + 63 - 2


def test_another_picture_under_the_same_tokens_is_another_prompt():
    model, prefixes = QWEN2_VL.build(), PrefixCache(gb=1)
    inputs = QWEN2_VL.inputs(model, [60], [2])
    answer(model, inputs, prefixes=prefixes)
    one, other = inputs["pixel_values"].chunk(2)
    changed = {**inputs, "pixel_values": torch.cat([one, other.flip(0)])}
    places = (inputs["input_ids"][0] == model.config.image_token_id).nonzero()[:, 0]
    assert_same(answer(model, changed, "snapkv", 0.3, prefixes), answer(model, changed, "snapkv", 0.3))
    assert prefixes.reused_tokens == int(places[len(places) // 2])


@pytest.mark.parametrize(("shared", "reused"), [(4, 0), (5, 5)])
def test_a_prompt_that_shares_less_than_an_eighth_passes_whole(shared, reused):
    """A chat template, for one: to go on behind it takes longer than to read it."""
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [40])
    ids = inputs["input_ids"]
    other = torch.where(torch.arange(40) < shared, ids, ids.roll(1, 1))
    other[0, shared] = ids[0, shared] % 2 + 1  # any other token
    answer(model, {**inputs, "input_ids": other}, prefixes=prefixes)
    for _ in range(2):
        assert_same(answer(model, inputs, "snapkv", 0.5, prefixes), answer(model, inputs, "snapkv", 0.5))
    assert prefixes.reused_tokens == reused + 39


def test_the_same_tokens_at_other_positions_are_others():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    ids = QWEN2.inputs(model, [40])["input_ids"]
    spread = torch.cat([torch.arange(10), torch.arange(20, 50)])[None]
    answer(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prefixes=prefixes)
    logits = []
    for prefix_cache in (None, prefixes, prefixes):
        with torch.no_grad(), kvcompress.compress(model, "snapkv", 0.5, prefix_cache=prefix_cache):
            logits.append(model(ids, position_ids=spread, logits_to_keep=1).logits)
    assert prefixes.reused_tokens == 10 + 39  # the first ten tokens stand where they did
    torch.testing.assert_close(logits[1], logits[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[2], logits[0], atol=TOLERANCE, rtol=0)


def rotated_by_length() -> torch.nn.Module:
    """A Qwen2 that rotates all tokens of prompts beyond 20 by their length (dynamic NTK)."""
    config = copy.deepcopy(QWEN2.build().config)
    config.max_position_embeddings = 20
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 4.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return type(QWEN2.build())(config).eval()


@pytest.mark.parametrize("make", [rotated_by_length, partial(sliding_model, "sliding", "full")])
def test_where_tokens_depend_on_more_than_those_before_them_nothing_is_shared(make):
    model, prefixes = make(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [63])
    shorter = {name: part[:, :40] for name, part in inputs.items()}
    for prompt in (shorter, inputs):
        assert_same(answer(model, prompt, "snapkv", 0.5, prefixes), answer(make(), prompt, "snapkv", 0.5))
    assert prefixes.reused_tokens == 0


def test_after_a_model_has_changed_a_cleared_cache_knows_nothing_of_it():
    model, prefixes = copy.deepcopy(QWEN2.build()), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [40])
    answer(model, inputs, "snapkv", 0.5, prefixes)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    prefixes.clear()
    assert_same(answer(model, inputs, "snapkv", 0.5, prefixes), answer(model, inputs, "snapkv", 0.5))


def test_models_dtypes_and_adapters_do_not_share():
    model, prefixes = copy.deepcopy(QWEN2.build()), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [40])
    answer(model, inputs, prefixes=prefixes)
    answer(copy.deepcopy(model), inputs, prefixes=prefixes)
    answer(model.bfloat16(), inputs, prefixes=prefixes)
    assert prefixes.reused_tokens == 0
    answer(model.float(), inputs, prefixes=prefixes)  # with what bfloat16 left of its embeddings
    projection = model.model.layers[0].self_attn.q_proj
    projection.base_layer, projection.active_adapters = torch.nn.Identity(), ["default"]
    reused = prefixes.reused_tokens
    answer(model, inputs, prefixes=prefixes)
    projection.active_adapters = ["other"]
    answer(model, inputs, prefixes=prefixes)
    assert prefixes.reused_tokens == reused
    answer(model, inputs, prefixes=prefixes)
    assert prefixes.reused_tokens == reused + 39


def test_a_shared_prompt_and_a_prefix_cache_go_together():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs, known = QWEN2.inputs(model, [60]), None
    answer(model, with_end(inputs, 5), prefixes=prefixes)
    for method in ("snapkv", "expected-attention"):
        expected = answer(model, inputs, method, 0.3)
        with kvcompress.SharedPrompt(model, known) as shared:
            assert_same(answer(model, inputs, method, 0.3, prefixes), expected)
        known = shared.prompt_pass
        assert known is None  # the decoder saw its end only


def test_an_exception_in_the_middle_of_a_prompt_leaves_it_as_it_was():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [60])
    answer(model, with_end(inputs, 5), prefixes=prefixes)
    held = prefixes.nbytes

    def fail(*_):
        raise RuntimeError("in the middle")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        answer(model, inputs, "snapkv", 0.3, prefixes)
    handle.remove()
    assert prefixes.nbytes == held
    assert_same(answer(model, inputs, "snapkv", 0.3, prefixes), answer(model, inputs, "snapkv", 0.3))


def test_it_keeps_to_its_bytes_and_none_keeps_nothing():
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [60])
    expected = answer(model, inputs, "snapkv", 0.3)
    for nbytes in (0, 1000, 50_000):
        prefixes = PrefixCache(gb=nbytes / 2**30)
        for _ in range(3):
            assert_same(answer(model, inputs, "snapkv", 0.3, prefixes), expected)
            assert prefixes.nbytes <= nbytes
        assert prefixes.prompt_tokens == 3 * 60
        assert (prefixes.reused_tokens > 0) == (nbytes == 50_000)
    prefixes.clear()
    assert prefixes.nbytes == 0
    with pytest.raises(KVCompressError, match="gb=-1"):
        PrefixCache(gb=-1)


@pytest.mark.parametrize(
    ("kwargs", "grad"), [({}, False), ({"logits_to_keep": 1}, True), ({"logits_to_keep": 2}, False)]
)
def test_logits_that_are_asked_for_are_all_there(kwargs, grad):
    """Without `logits_to_keep` those of all tokens are; and a gradient needs the whole pass."""
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [40])
    answer(model, inputs, prefixes=prefixes)
    outputs = []
    for prefix_cache in (None, prefixes):
        with torch.set_grad_enabled(grad), kvcompress.compress(model, "knorm", 0.5, prefix_cache=prefix_cache):
            outputs.append(model(**inputs, **kwargs).logits)
    torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=0)
    assert prefixes.reused_tokens == (38 if kwargs == {"logits_to_keep": 2} else 0)


def test_hidden_states_that_are_asked_for_are_those_of_the_whole_prompt():
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    asked = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 1}
    with kvcompress.compress(model, "knorm", 0.5, prefix_cache=prefixes):
        outputs = [model.generate(**QWEN2.inputs(model, [40]), **asked) for _ in range(2)]
    assert [output.hidden_states[0][0].shape[1] for output in outputs] == [40, 40]
