"""A prefill that several methods share is the real one: same kept sets, same tokens, same sizes."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress import device
from kvcompress.cache_name import cache_in
from kvcompress.hooks.model import text_decoder
from kvcompress.hooks.shared_prompt import PromptPass, SharedPrompt
from tests.support.answers import answer, assert_same
from tests.support.examples import examples, some
from tests.support.families import FAMILIES
from tests.support.learned_checkpoints import checkpoint_for
from tests.support.strategies import LEARNED, METHODS, SOME_METHODS, cases

NEW = 4
QWEN2, ONEVISION, QWEN2_VL = (FAMILIES[name] for name in ("qwen2", "llava-onevision", "qwen2-vl"))
WITH_SLIDING_LAYERS = {"gemma3"}


def shared_answer(model, inputs, method, ratio, known=None, room=float("inf"), **options):
    """What a generation gives, and what it shared."""
    with SharedPrompt(model, known, room) as shared:
        ours = answer(model, inputs, method, ratio, NEW, **options)
    assert "forward" not in vars(model)
    return ours, shared


@contextmanager
def watched(module, calls):
    """Add each forward pass of `module` to `calls`."""
    handle = module.register_forward_pre_hook(lambda *given: calls.append(given))
    try:
        yield
    finally:
        handle.remove()


def pass_of(model, inputs) -> PromptPass:
    return shared_answer(model, inputs, None, None)[-1].prompt_pass


@pytest.mark.parametrize("family", FAMILIES)
@examples(2)
@given(data=st.data())
def test_a_shared_pass_gives_the_logits_and_kept_sets_of_ones_own_bit_for_bit(family, data):
    case = data.draw(cases(family))
    model, inputs, options = case.model, case.inputs, dict(case.options)
    known = pass_of(model, inputs)
    expected = answer(model, inputs, case.method, case.ratio, **options)
    ours, shared = shared_answer(model, inputs, case.method, case.ratio, known, **options)
    assert_same(ours, expected)
    sums_in_the_pass = case.policy.needs_sums and len(set(case.lengths)) == 1  # with pads it sums afterwards
    runs_itself = sums_in_the_pass or family in WITH_SLIDING_LAYERS
    assert shared.is_known == (not runs_itself)


@pytest.mark.parametrize(("lengths", "is_shared"), [([20, 9], True), ([20, 20], False)], ids=["padded", "even"])
def test_a_sum_of_attention_in_fp32_shares_a_pass_where_it_is_not_computed_in_it(lengths, is_shared):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, lengths)
    ours, shared = shared_answer(model, inputs, "h2o", 0.3, pass_of(model, inputs))
    assert_same(ours, answer(model, inputs, "h2o", 0.3))
    assert shared.is_known == is_shared


@pytest.mark.parametrize("method", some(METHODS, SOME_METHODS))
def test_every_method_leaves_the_shared_pass_as_it_was(method):
    """In bf16, where no method computes the attention itself."""
    model = copy.deepcopy(ONEVISION.build()).bfloat16()
    inputs = ONEVISION.inputs(model, [31, 44], [1, 0])
    inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    known = pass_of(model, inputs)
    before = [[state.clone() for state in layer.states] for layer in known.layers]
    expected = answer(model, inputs, method, 0.3)
    ours, shared = shared_answer(model, inputs, method, 0.3, known)
    assert_same(ours, expected)
    assert shared.is_known
    for layer, states in zip(known.layers, before, strict=True):
        assert all(map(torch.equal, layer.states, states))


@pytest.mark.parametrize("options", [{"method": "fastv"}, {"method": "snapkv", "prefill_chunk": 8}])
def test_what_changes_the_pass_runs_its_own(options):
    model = ONEVISION.build()
    inputs = ONEVISION.inputs(model, [31, 44], [1, 1])
    known, (method, *rest) = pass_of(model, inputs), options.values()
    more = {"prefill_chunk": rest[0]} if rest else {}
    ours, shared = shared_answer(model, inputs, method, 0.5, known, **more)
    assert not shared.is_known
    assert shared.prompt_pass is None
    assert torch.equal(ours.tokens, answer(model, inputs, method, 0.5, **more).tokens)


@pytest.mark.parametrize("family", [QWEN2, ONEVISION, QWEN2_VL], ids=lambda family: family.name)
def test_a_pass_that_a_reader_of_hidden_states_ran_serves_all_methods(family):
    model = family.build()
    inputs = family.inputs(model, [31, 44], [1, 0] if family.is_vlm else None)

    def checkpoint(method):
        return {"checkpoint": checkpoint_for(method, model)} if method in LEARNED else {}

    known = pass_of(model, inputs)
    first = shared_answer(model, inputs, "kvzap", 0.5, known, **checkpoint("kvzap"))[-1]
    assert not first.is_known, "the pass has no hidden states"
    assert first.prompt_pass.seconds == known.seconds
    assert first.prompt_pass.second_passes is known.second_passes
    for method in ("kvzap", "fastkvzip", "snapkv", "kvzip"):
        ours, shared = shared_answer(model, inputs, method, 0.3, first.prompt_pass, **checkpoint(method))
        assert shared.is_known
        assert_same(ours, answer(model, inputs, method, 0.3, **checkpoint(method)))


@pytest.mark.parametrize(
    ("method", "few", "other"),
    [
        ("kvzip", {}, {"chunk_size": 7}),
        ("kvcompose", {}, {"window_size": 7}),
        ("hindsight", {"answer_tokens": 4}, {"answer_tokens": 3}),
    ],
    ids=["kvzip", "kvcompose", "hindsight"],
)
@pytest.mark.parametrize("family", [QWEN2, ONEVISION, QWEN2_VL], ids=lambda family: family.name)
def test_a_second_pass_runs_once_for_all_budgets_of_a_method_and_its_options(method, few, other, family):
    model = family.build()
    inputs = family.inputs(model, [31, 44], [1, 0] if family.is_vlm else None)
    known, passes = pass_of(model, inputs), []

    def run(ratio, **options):
        options = few | options
        with watched(text_decoder(model), passes):
            ours, shared = shared_answer(model, inputs, method, ratio, known, **options)
        count = len(passes)
        passes.clear()
        assert shared.is_known
        assert_same(ours, answer(model, inputs, method, ratio, **options))
        return count

    steps = NEW - 1
    assert run(0.5) > steps
    assert run(0.3) == steps
    if family is not QWEN2:
        return
    assert run(0.3, decode_budget=20) == steps
    assert run(0.3, scope="context", context_tokens=-6) > steps, "it has other candidates"
    assert run(0.5, scope="context", context_tokens=-6) == steps
    assert run(0.3, **other) > steps
    assert run(0.3) == steps


def test_the_seconds_of_a_second_pass_count_where_it_was_spared(monkeypatch):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [40])
    first = shared_answer(model, inputs, "kvzip", 0.5)[-1]
    (result,) = first.prompt_pass.second_passes.values()
    first.prompt_pass.second_passes.update(
        {key: result._replace(seconds=100.0) for key in first.prompt_pass.second_passes}
    )
    for method, least in (("kvzip", 99.0), ("snapkv", 0.0)):
        correction_s = shared_answer(model, inputs, method, 0.3, first.prompt_pass)[-1].correction_s
        assert least < correction_s - first.prompt_pass.seconds + 1.0 < least + 2.0


@pytest.mark.parametrize("other", ["input_ids", "pixel_values", "inputs_embeds", "position_ids"])
def test_a_pass_is_not_taken_for_that_of_other_inputs(other):
    """Of other tokens, and with the same: of another picture, of embeddings without tokens, of tokens elsewhere."""
    model = QWEN2_VL.build() if other == "pixel_values" else QWEN2.build()
    inputs = QWEN2_VL.inputs(model, [40], [1]) if other == "pixel_values" else QWEN2.inputs(model, [20])
    if other == "inputs_embeds":
        ids = inputs["input_ids"]
        inputs = {other: model.get_input_embeddings()(ids).detach(), "attention_mask": torch.ones_like(ids)}
        changed = {**inputs, other: inputs[other].flip(1)}
    elif other == "position_ids":
        changed = {**inputs, other: 2 * torch.arange(20)[None]}
        inputs = {**inputs, other: torch.arange(20)[None]}
    elif other == "input_ids":
        changed = QWEN2.inputs(model, [20], seed=1)
    else:
        changed = {**inputs, other: -inputs[other]}

    def step(inputs, known):
        with torch.no_grad(), SharedPrompt(model, known) as shared, kvcompress.compress(model, "knorm", 0.5):
            return model(**inputs, logits_to_keep=1).logits, shared

    logits, first = step(inputs, None)
    again, same = step(inputs, first.prompt_pass)
    assert same.is_known
    assert torch.equal(again, logits)
    expected, _ = step(changed, None)
    ours, shared = step(changed, first.prompt_pass)
    assert not shared.is_known
    assert torch.equal(ours, expected)
    assert not torch.equal(expected, logits)


def test_generate_does_not_take_a_pass_for_that_of_another_picture():
    """It may encode the picture itself, and hand the model features."""
    model = QWEN2_VL.build()
    inputs = QWEN2_VL.inputs(model, [40], [1])
    known = pass_of(model, inputs)
    assert shared_answer(model, inputs, "knorm", 0.5, known)[-1].is_known
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    ours, shared = shared_answer(model, other, "knorm", 0.5, known)
    assert not shared.is_known
    assert_same(ours, answer(model, other, "knorm", 0.5, NEW))


def test_positions_are_those_of_the_prompt_not_of_the_model_s_latest():
    """Qwen2-VL stores the position offset of its latest prompt's images; `generate` computes it again."""
    model = QWEN2_VL.build()
    inputs, other = QWEN2_VL.inputs(model, [40], [2]), QWEN2_VL.inputs(model, [30])

    def step(known):
        with SharedPrompt(model, known) as shared, kvcompress.compress(model, "knorm", 0.5):
            cache = model(**inputs).past_key_values
            logits = model(input_ids=torch.tensor([[9]]), past_key_values=cache).logits
        return logits, shared

    with torch.no_grad():
        expected, first = step(None)
        pass_of(model, other)
        logits, second = step(first.prompt_pass)
    assert second.is_known
    assert torch.equal(logits, expected)


def test_a_pass_larger_than_the_room_is_not_kept():
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [20, 9])
    known = pass_of(model, inputs)
    heads = model.config.num_attention_heads + 2 * model.config.num_key_value_heads
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    assert known.nbytes == known.decoder_inputs.nbytes + 4 * len(known.layers) * 2 * 20 * heads * head_dim
    assert shared_answer(model, inputs, "knorm", 0.5, room=known.nbytes)[-1].prompt_pass is not None
    small, shared = shared_answer(model, inputs, "knorm", 0.5, room=known.nbytes - 1)
    assert shared.prompt_pass is None
    assert_same(small, answer(model, inputs, "knorm", 0.5))


def test_a_pass_that_is_not_kept_does_not_wait_for_the_device_at_every_layer(monkeypatch):
    model, waits = QWEN2.build(), []
    inputs = QWEN2.inputs(model, [20, 9])
    monkeypatch.setattr(device, "synchronise", waits.append)
    shared_answer(model, inputs, "knorm", 0.5, room=1)
    assert len(waits) <= 3  # around the comparison of inputs, and at the end


def test_a_forward_that_accelerate_has_hooked_stays_hooked():
    """As on a model whose layers lie on several devices (`device_map`)."""
    model = copy.deepcopy(QWEN2.build())
    inputs = QWEN2.inputs(model, [20, 9])
    expected = answer(model, inputs, "knorm", 0.5)
    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    add_hook_to_module(model, Counting())
    hooked, known = model.forward, None
    for _ in range(2):
        with SharedPrompt(model, known) as shared, kvcompress.compress(model, "knorm", 0.5):
            tokens = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        known = shared.prompt_pass
        assert torch.equal(tokens, expected[0])
        assert model.forward is hooked
    assert shared.is_known
    assert len(calls) == NEW + NEW - 1  # the second prefill did not run


def test_the_seconds_are_the_model_s_own_and_count_for_those_that_share_it(monkeypatch):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [20, 9])
    decoder = type(model.model)
    forward, score = decoder.forward, kvcompress.clusters.knorm.KnormKVCluster.score
    clock = SimpleNamespace(seconds=0.0, perf_counter=lambda: clock.seconds)

    def slow_forward(self, *args, **kwargs):
        clock.seconds += 0.2 if cache_in(kwargs).get_seq_length() == 0 else 0
        return forward(self, *args, **kwargs)

    def slow_score(self, *args, **kwargs):
        clock.seconds += 0.05
        return score(self, *args, **kwargs)

    monkeypatch.setattr(kvcompress.device, "time", clock)
    monkeypatch.setattr(decoder, "forward", slow_forward)
    monkeypatch.setattr(kvcompress.clusters.knorm.KnormKVCluster, "score", slow_score)
    first = shared_answer(model, inputs, "knorm", 0.5)[-1]
    assert first.prompt_pass.seconds == pytest.approx(0.2)  # without three layers' scores
    assert first.correction_s == 0
    second = shared_answer(model, inputs, "knorm", 0.5, first.prompt_pass)[-1]
    assert second.correction_s == pytest.approx(0.2)
