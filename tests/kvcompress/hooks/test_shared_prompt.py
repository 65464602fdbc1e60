"""A prefill that several methods share is the real one: same kept sets, same tokens, same sizes."""

import copy
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.cache_name import cache_in
from kvcompress.hooks import shared_prompt
from kvcompress.hooks.model import text_decoder
from kvcompress.hooks.shared_prompt import PromptPass, SharedPrompt
from tests.support.calibrations import calibration_of
from tests.support.examples import examples, some
from tests.support.families import FAMILIES
from tests.support.learned_checkpoints import checkpoint_for
from tests.support.strategies import LEARNED, METHODS, SOME_METHODS, cases

NEW = 4
QWEN2, ONEVISION, QWEN2_VL = (FAMILIES[name] for name in ("qwen2", "llava-onevision", "qwen2-vl"))
WITH_SLIDING_LAYERS = {"gemma3"}


def answer(model, inputs, method, ratio, known=None, share=True, room=float("inf"), **options):
    """What a generation gives, its cache, and what it shared."""
    shared = SharedPrompt(model, known, room)
    with (
        kvcompress.compress(model, method, ratio, **options, **calibration_of(method, model)) as session,
        shared if share else nullcontext(),
    ):
        output = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    assert "forward" not in vars(model)
    return output.sequences, torch.stack(output.logits), session.cache, shared


@contextmanager
def watched(module, calls):
    """Add each forward pass of `module` to `calls`."""
    handle = module.register_forward_pre_hook(lambda *given: calls.append(given))
    try:
        yield
    finally:
        handle.remove()


def pass_of(model, inputs) -> PromptPass:
    return answer(model, inputs, None, None)[-1].prompt_pass


def assert_same(one, other):
    (tokens, logits, cache, _), (other_tokens, other_logits, other_cache, _) = one, other
    assert torch.equal(tokens, other_tokens)
    assert torch.equal(logits, other_logits)
    assert cache.nbytes == other_cache.nbytes
    assert cache.realised_ratios() == other_cache.realised_ratios()
    for layer in range(len(cache.layers)):
        if layer in {each.layer_idx for each in cache.compressed_layers}:
            for row, other_row in zip(cache.kept_indices(layer), other_cache.kept_indices(layer), strict=True):
                assert all(map(torch.equal, row, other_row))


@pytest.mark.parametrize("family", FAMILIES)
@examples(2)
@given(data=st.data())
def test_a_shared_pass_gives_the_logits_and_kept_sets_of_ones_own_bit_for_bit(family, data):
    case = data.draw(cases(family))
    model, inputs, options = case.model, case.inputs, dict(case.options)
    known = pass_of(model, inputs)
    expected = answer(model, inputs, case.method, case.ratio, share=False, **options)
    ours = answer(model, inputs, case.method, case.ratio, known, **options)
    assert_same(ours, expected)
    runs_itself = case.policy.needs_sums or family in WITH_SLIDING_LAYERS
    assert ours[-1].is_known == (not runs_itself)


@pytest.mark.parametrize("method", some(METHODS, SOME_METHODS))
def test_every_method_leaves_the_shared_pass_as_it_was(method):
    """In bf16, where no method computes the attention itself."""
    model = copy.deepcopy(ONEVISION.build()).bfloat16()
    inputs = ONEVISION.inputs(model, [31, 44], [1, 0])
    inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    known = pass_of(model, inputs)
    before = [[state.clone() for state in layer.states] for layer in known.layers]
    expected = answer(model, inputs, method, 0.3, share=False)
    ours = answer(model, inputs, method, 0.3, known)
    assert_same(ours, expected)
    assert ours[-1].is_known
    for layer, states in zip(known.layers, before, strict=True):
        assert all(map(torch.equal, layer.states, states))


@pytest.mark.parametrize(
    "options",
    [
        {"first_token": "compressed"},
        {"scope": "context", "context_tokens": -6},
        {"decode_budget": 8, "decode_interval": 2},
        {"cache_implementation": "static", "max_new_tokens": NEW},
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "quantized", "kv_backend": "hqq", "kv_bits": 8, "kv_group_size": 16},
        {"cache_implementation": "think", "key_recent": 3},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_every_protocol_and_storage_can_share_a_pass(options):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [40, 23])
    known = pass_of(model, inputs)
    ours = answer(model, inputs, "snapkv", 0.4, known, **options)
    assert ours[-1].is_known
    assert_same(ours, answer(model, inputs, "snapkv", 0.4, share=False, **options))


@pytest.mark.parametrize("options", [{"method": "fastv"}, {"method": "snapkv", "prefill_chunk": 8}])
def test_what_changes_the_pass_runs_its_own(options):
    model = ONEVISION.build()
    inputs = ONEVISION.inputs(model, [31, 44], [1, 1])
    known, (method, *rest) = pass_of(model, inputs), options.values()
    more = {"prefill_chunk": rest[0]} if rest else {}
    ours = answer(model, inputs, method, 0.5, known, **more)
    assert not ours[-1].is_known
    assert ours[-1].prompt_pass is None
    assert torch.equal(ours[0], answer(model, inputs, method, 0.5, share=False, **more)[0])


@pytest.mark.parametrize("family", [QWEN2, ONEVISION, QWEN2_VL], ids=lambda family: family.name)
def test_a_pass_that_a_reader_of_hidden_states_ran_serves_all_methods(family):
    model = family.build()
    inputs = family.inputs(model, [31, 44], [1, 0] if family.is_vlm else None)

    def checkpoint(method):
        return {"checkpoint": checkpoint_for(method, model)} if method in LEARNED else {}

    known = pass_of(model, inputs)
    first = answer(model, inputs, "kvzap", 0.5, known, **checkpoint("kvzap"))[-1]
    assert not first.is_known, "the pass has no hidden states"
    assert first.prompt_pass.seconds == known.seconds
    assert first.prompt_pass.second_passes is known.second_passes
    for method in ("kvzap", "fastkvzip", "snapkv", "kvzip"):
        ours = answer(model, inputs, method, 0.3, first.prompt_pass, **checkpoint(method))
        assert ours[-1].is_known
        assert_same(ours, answer(model, inputs, method, 0.3, share=False, **checkpoint(method)))


@pytest.mark.parametrize(
    ("method", "other"),
    [("kvzip", {"chunk_size": 7}), ("kvcompose", {"window_size": 7}), ("hindsight", {"answer_tokens": 3})],
)
@pytest.mark.parametrize("family", [QWEN2, ONEVISION, QWEN2_VL], ids=lambda family: family.name)
def test_a_second_pass_runs_once_for_all_budgets_of_a_method_and_its_options(method, other, family):
    model = family.build()
    inputs = family.inputs(model, [31, 44], [1, 0] if family.is_vlm else None)
    known, passes = pass_of(model, inputs), []

    def run(ratio, **options):
        with watched(text_decoder(model), passes):
            ours = answer(model, inputs, method, ratio, known, **options)
        count = len(passes)
        passes.clear()
        assert ours[-1].is_known
        assert_same(ours, answer(model, inputs, method, ratio, share=False, **options))
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
    first = answer(model, inputs, "kvzip", 0.5)[-1]
    (result,) = first.prompt_pass.second_passes.values()
    first.prompt_pass.second_passes.update(
        {key: result._replace(seconds=100.0) for key in first.prompt_pass.second_passes}
    )
    for method, least in (("kvzip", 99.0), ("snapkv", 0.0)):
        correction_s = answer(model, inputs, method, 0.3, first.prompt_pass)[-1].correction_s
        assert least < correction_s - first.prompt_pass.seconds + 1.0 < least + 2.0


def test_a_pass_is_not_taken_for_that_of_another_batch():
    model = QWEN2.build()
    known = pass_of(model, QWEN2.inputs(model, [20, 9]))
    inputs = QWEN2.inputs(model, [20, 9], seed=1)
    ours = answer(model, inputs, "snapkv", 0.4, known)
    assert not ours[-1].is_known
    assert_same(ours, answer(model, inputs, "snapkv", 0.4, share=False))
    assert ours[-1].prompt_pass.is_of(ours[-1].prompt_pass.inputs)  # it was noted in the other's place


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
    assert answer(model, inputs, "knorm", 0.5, room=known.nbytes)[-1].prompt_pass is not None
    small = answer(model, inputs, "knorm", 0.5, room=known.nbytes - 1)
    assert small[-1].prompt_pass is None
    assert_same(small, answer(model, inputs, "knorm", 0.5, share=False))


def test_a_pass_that_is_not_kept_does_not_wait_for_the_device_at_every_layer(monkeypatch):
    model, waits = QWEN2.build(), []
    inputs = QWEN2.inputs(model, [20, 9])
    monkeypatch.setattr(shared_prompt, "synchronise", waits.append)
    answer(model, inputs, "knorm", 0.5, room=1)
    assert len(waits) < len(model.model.layers)


def test_a_forward_that_accelerate_has_hooked_stays_hooked():
    """As on a model whose layers lie on several devices (`device_map`)."""
    model = copy.deepcopy(QWEN2.build())
    inputs = QWEN2.inputs(model, [20, 9])
    expected = answer(model, inputs, "knorm", 0.5, share=False)
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


def test_an_exception_leaves_the_model_as_it_was(monkeypatch):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [20, 9])

    def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(kvcompress.clusters.knorm.KnormKVCluster, "score", broken)
    with pytest.raises(ZeroDivisionError):
        answer(model, inputs, "knorm", 0.5)
    assert "forward" not in vars(model)


def test_the_seconds_are_the_model_s_own_and_count_for_those_that_share_it(monkeypatch):
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [20, 9])
    decoder = type(model.model)
    forward, score = decoder.forward, kvcompress.clusters.knorm.KnormKVCluster.score

    def slow_forward(self, *args, **kwargs):
        time.sleep(0.2 if cache_in(kwargs).get_seq_length() == 0 else 0)
        return forward(self, *args, **kwargs)

    def slow_score(self, *args, **kwargs):
        time.sleep(0.05)
        return score(self, *args, **kwargs)

    monkeypatch.setattr(decoder, "forward", slow_forward)
    monkeypatch.setattr(kvcompress.clusters.knorm.KnormKVCluster, "score", slow_score)
    first = answer(model, inputs, "knorm", 0.5)[-1]
    assert 0.2 < first.prompt_pass.seconds < 0.3  # three layers scored in 0.15 s
    assert -0.05 < first.correction_s <= 0
    second = answer(model, inputs, "knorm", 0.5, first.prompt_pass)[-1]
    assert second.correction_s == pytest.approx(first.prompt_pass.seconds, abs=0.05)
