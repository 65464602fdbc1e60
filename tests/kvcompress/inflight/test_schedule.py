"""The schedule of requests in flight: prompts, or pieces of them, and decode steps take turns."""

import logging
import traceback
import weakref
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

import kvcompress
from kvcompress import KVCompressError, PrefixCache, Request
from kvcompress.cache.cache import say_once
from kvcompress.cache_name import cache_in
from kvcompress.hooks.session import Session
from kvcompress.inflight.cache import SlotCache
from kvcompress.inflight.layer import SlotLayer
from tests.support.examples import examples
from tests.support.families import FAMILIES, MORE_FAMILIES
from tests.support.in_flight import OutOfMemory, tokens_alone, with_end

QWEN2, QWEN2_VL, ONEVISION = (FAMILIES[name] for name in ("qwen2", "qwen2-vl", "llava-onevision"))


class Passes:
    """The events in order: "step" for a decode step, the number of tokens for a pass over a prompt, (index,) for a
    request's token."""

    def __init__(self):
        self.events = []

    @contextmanager
    def of(self, model):
        decoder = (
            model.base_model if not hasattr(model.base_model, "language_model") else model.base_model.language_model
        )

        def note(_, args, kwargs, output):
            is_step = isinstance(cache_in(kwargs), SlotCache)
            self.events.append("step" if is_step else output.last_hidden_state.shape[1])

        with decoder.register_forward_hook(note, with_kwargs=True):
            yield self

    def requests(self, prompts, new):
        return [
            Request(inputs, {"max_new_tokens": count, "logits_processor": LogitsProcessorList([_Token(self, i)])})
            for i, (inputs, count) in enumerate(zip(prompts, new, strict=True))
        ]

    @property
    def prompts(self):
        return [event for event in self.events if isinstance(event, int)]

    def pauses(self):
        """Return what happens between two tokens of a request: steps, and the tokens of each pass over a prompt."""
        for index in {event for event in self.events if isinstance(event, tuple)}:
            places = [place for place, event in enumerate(self.events) if event == index]
            for start, stop in pairwise(places):
                between = [event for event in self.events[start:stop] if not isinstance(event, tuple)]
                yield between.count("step"), [event for event in between if event != "step"]


class _Token(LogitsProcessor):
    def __init__(self, passes, index):
        self.note = lambda: passes.events.append((index,))

    def __call__(self, input_ids, scores):
        self.note()
        return scores


def run(model, asked, slots=2, method="snapkv", ratio=0.3, prefixes=None, options=None, **more):
    with kvcompress.compress(model, method, ratio, prefix_cache=prefixes, **(options or {})) as session:
        return sorted(session.generate_many(asked, slots, do_sample=False, **more), key=lambda answer: answer.index)


def alone(model, inputs, new, method="snapkv", **options):
    return tokens_alone(model, inputs, method, 0.3, options, max_new_tokens=new, do_sample=False)


def answered(count, length, new):
    """Return prompts of QWEN2 and the answers that each gets alone."""
    prompts = [QWEN2.inputs(QWEN2.build(), [length], seed=seed) for seed in range(count)]
    return prompts, [alone(QWEN2.build(), prompt, new) for prompt in prompts]


@given(
    prefill_tokens=st.none() | st.integers(1, 40),
    slots=st.integers(1, 5),
    asked=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=8),
)
@examples(8)
def test_between_two_tokens_of_a_request_lie_at_most_two_steps_and_one_piece(prefill_tokens, slots, asked):
    model, passes = QWEN2.build(), Passes()
    prompts = [QWEN2.inputs(model, [length]) for length, _ in asked]
    with passes.of(model):
        run(model, passes.requests(prompts, [new for _, new in asked]), slots, prefill_tokens=prefill_tokens)
    assert sum(passes.prompts) == sum(length for length, _ in asked)
    most = prefill_tokens or 70
    assert max(passes.prompts) <= most
    for steps, pieces in passes.pauses():
        assert steps <= 2
        assert len(pieces) <= 1


def test_the_first_token_of_a_long_queue_comes_after_one_prompt_and_slots_that_are_ready_decode():
    model, passes = QWEN2.build(), Passes()
    prompts = [QWEN2.inputs(model, [40], seed=seed) for seed in range(12)]
    with passes.of(model), kvcompress.compress(model, "snapkv", 0.3) as session:
        requests = passes.requests(prompts, [3] + [9] * 11)
        answer = next(session.generate_many(requests, slots=8, do_sample=False))
        assert answer.index == 0
    assert passes.events == [40, (0,), "step", (0,), 40, (1,), "step", (0,), (1,)]


@pytest.mark.parametrize("family", ["qwen2-vl", "llava-onevision"])
def test_a_prompt_in_pieces_passes_once_and_so_do_its_images(family):
    made, passes = FAMILIES[family], Passes()
    model = made.build()
    inputs, seen, given = made.inputs(model, [61], [1]), [], []
    tower = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower")))
    with tower.register_forward_hook(lambda *_: seen.append(1)):
        expected = alone(model, inputs, 4)
        encoded = len(seen)
        note = model.register_forward_pre_hook(lambda _, args, kwargs: given.append({*kwargs}), with_kwargs=True)
        with note, passes.of(model):
            (answer,) = run(model, passes.requests([inputs], [4]), prefill_tokens=20)
    assert answer.tokens.tolist() == expected
    assert (passes.prompts, len(seen)) == ([20, 20, 20, 1], 2 * encoded)
    images = {"pixel_values", "mm_encoder_outputs"}  # transformers 5.23 encodes them before the first pass
    assert [bool(names & images) for names in given] == [True] + [False] * 6  # pieces and steps


def test_pieces_begin_behind_what_a_prefix_cache_knows_and_are_known_to_the_next_prompt():
    model, prefixes, passes = QWEN2_VL.build(), PrefixCache(gb=1), Passes()
    inputs = QWEN2_VL.inputs(model, [60], [1])
    prompts = [with_end(inputs, 15, seed) for seed in range(3)]
    expected = [alone(model, prompt, 4) for prompt in prompts]
    with passes.of(model):
        answers = run(model, passes.requests(prompts, [4] * 3), prefill_tokens=10, prefixes=prefixes)
    assert [answer.tokens.tolist() for answer in answers] == expected
    assert passes.prompts == [10] * 6 + [10, 5] * 2
    assert (prefixes.prompt_tokens, prefixes.reused_tokens) == (180, 90)


def test_what_is_known_may_be_split_while_a_prompt_is_read():
    """Another generation of the session runs between two pieces, and shares a shorter prefix."""
    model, prefixes = QWEN2.build(), PrefixCache(gb=1)
    inputs = QWEN2.inputs(model, [60])
    prompts = [with_end(inputs, 30, 1), with_end(inputs, 29, 2), with_end(inputs, 50, 3)]
    expected = [alone(model, prompt, 6) for prompt in prompts]
    with kvcompress.compress(model, "snapkv", 0.3, prefix_cache=prefixes) as session:
        model.generate(**prompts[0], max_new_tokens=2, do_sample=False)
        steps = session.generate_many(prompts[:2], 2, prefill_tokens=7, max_new_tokens=6, do_sample=False).by_step()
        found = next(steps)
        between = model.generate(**prompts[2], max_new_tokens=6, do_sample=False)[0, 60:].tolist()
        found += [answer for done in steps for answer in done]
    assert between == expected[2]
    assert {answer.index: answer.tokens.tolist() for answer in found} == dict(enumerate(expected[:2]))


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("kvzip", {}, "method 'kvzip' reads the prompt twice"),
        ("fastv", {}, "method 'fastv' drops tokens"),
        ("snapkv", {"prefill_chunk": 32}, "prefill_chunk= has chunks of its own"),
    ],
)
def test_a_prompt_that_cannot_be_cut_is_read_whole_which_is_said_once(method, options, reason, caplog):
    model = QWEN2_VL.build()
    prompts = [QWEN2_VL.inputs(model, [60], [1], seed=seed) for seed in range(3)]
    expected = [alone(model, prompt, 4, method, **options) for prompt in prompts]
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "kvcompress"):
        how = {"method": method, "options": options, "prefill_tokens": 20, "max_new_tokens": 4}
        run(model, [QWEN2_VL.inputs(model, [20])], **how)
        assert caplog.messages == []
        answers = run(model, prompts, **how)
    assert [answer.tokens.tolist() for answer in answers] == expected
    assert caplog.messages == [f"prefill_tokens=20: prompts are prefilled whole, because {reason}"]


def test_the_models_with_windows_and_with_images_seen_both_ways_are_read_whole(caplog):
    say_once.cache_clear()
    for family, said in (("gemma4", "sliding windows"), ("molmo2", "image tokens that see each other")):
        made = MORE_FAMILIES[family]
        model = made.build()
        inputs = made.inputs(model, [60], [1])
        expected = alone(model, inputs, 4)
        with caplog.at_level(logging.WARNING, "kvcompress"):
            (answer,) = run(model, [inputs], prefill_tokens=20, max_new_tokens=4)
        assert answer.tokens.tolist() == expected
        assert said in caplog.messages[-1]


def test_a_request_that_fails_between_two_pieces_ends_alone(monkeypatch):
    model = QWEN2.build()
    prompts, expected = answered(4, 50, 6)
    calls = 0

    def fail(module, args, kwargs):
        nonlocal calls
        calls += not isinstance(cache_in(kwargs), SlotCache)
        if calls == 5:  # the second piece of the second prompt
            calls += 1
            raise RuntimeError("in the middle")

    with model.model.layers[1].register_forward_pre_hook(fail, with_kwargs=True):
        answers = run(model, prompts, prefill_tokens=20, max_new_tokens=6)
    assert str(answers[1].error) == "in the middle"
    assert [answers[i].tokens.tolist() for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


@pytest.mark.parametrize("where", ["piece", "step"])
def test_where_memory_ends_while_a_prompt_is_read_it_begins_anew(where, monkeypatch):
    model = QWEN2.build()
    prompts, expected = answered(5, 50, 6)
    # The third step of the first request, when two pieces of the second are read.
    first, owner, name = {"step": (8, SlotLayer, "update"), "piece": (5, Session, "_prefill")}[where]
    memory = OutOfMemory(first)
    monkeypatch.setattr(owner, name, memory.failing(getattr(owner, name)))
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        flight = session.generate_many(prompts, 4, prefill_tokens=20, max_new_tokens=6, do_sample=False)
        found = {answer.index: answer.tokens.tolist() for answer in flight}
    assert memory.calls > first
    assert found == dict(enumerate(expected))
    assert flight.slots == 2


def test_the_states_of_pieces_are_counted():
    model = QWEN2.build()
    peaks = []
    for prefill_tokens in (None, 20):
        with kvcompress.compress(model, "snapkv", 0.3) as session:
            prompts = [QWEN2.inputs(model, [60])]
            flight = session.generate_many(prompts, 1, prefill_tokens=prefill_tokens, max_new_tokens=3)
            next(flight)
        peaks.append(flight.peak_kv_bytes)
    config = model.config
    heads = 1 + 2 * config.num_key_value_heads / config.num_attention_heads
    pieces = 40 * config.num_hidden_layers * heads * config.hidden_size * 4
    assert peaks[0] < pieces < peaks[1]


def test_an_answer_says_how_long_its_longest_pause_was():
    model = QWEN2.build()
    answers = run(model, [Request(QWEN2.inputs(model, [30]), {"max_new_tokens": new}) for new in (1, 2, 6)])
    assert answers[0].pause_s is None
    assert answers[1].tpot_s == answers[1].pause_s > 0
    assert answers[2].tpot_s <= answers[2].pause_s <= 5 * answers[2].tpot_s


def test_leaving_the_session_in_the_middle_of_a_prompt_leaves_the_model_as_it_was():
    model = QWEN2.build()
    prompts = [QWEN2.inputs(model, [50], seed=seed) for seed in range(2)]
    expected = alone(model, prompts[1], 6)
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        steps = session.generate_many(prompts, 2, prefill_tokens=20, max_new_tokens=6, do_sample=False).by_step()
        next(steps), next(steps)  # a piece of the second prompt is read
    with pytest.raises(KVCompressError, match="was left while requests were in flight"):
        next(steps)
    assert alone(model, prompts[1], 6) == expected


@pytest.mark.parametrize("failures", [1, 2])
def test_a_slot_that_holds_nothing_is_given_up_for_a_prompt_that_needs_the_memory(failures, monkeypatch):
    model = QWEN2.build()
    prompts, expected = answered(2, 50, 6)
    memory = OutOfMemory(*range(2, 2 + failures))
    monkeypatch.setattr(Session, "_prefill", memory.failing(Session._prefill))
    answers = run(model, prompts, slots=1, max_new_tokens=6)
    assert answers[0].tokens.tolist() == expected[0]
    if failures == 1:
        assert answers[1].tokens.tolist() == expected[1]
    else:  # there was nothing left to give up
        assert isinstance(answers[1].error, torch.OutOfMemoryError)


def test_a_request_that_nobody_wants_any_more_ends_at_the_next_piece_of_its_prompt():
    model, passes, asked = QWEN2.build(), Passes(), iter([True, True, False])
    prompts, expected = answered(2, 40, 3)
    requests = passes.requests(prompts, [3, 3])
    requests[0].is_wanted = lambda: next(asked)
    with passes.of(model):
        answers = run(model, requests, slots=1, prefill_tokens=10)
    assert str(answers[0].error) == "the request was taken back"
    assert answers[1].tokens.tolist() == expected[1]
    assert [event for event in passes.events if isinstance(event, int)] == [10] * (2 + 4)


def test_an_answer_ends_where_its_listener_says_and_the_slot_is_free_at_once():
    model, passes = QWEN2.build(), Passes()
    prompts, expected = answered(2, 40, 9)
    heard = []

    def listen(tokens):
        heard.append(list(tokens))
        return len(tokens) == 3

    requests = passes.requests(prompts, [9, 9])
    requests[0].on_tokens = listen
    with passes.of(model):
        answers = run(model, requests, slots=1)
    assert heard == [expected[0][:1], expected[0][:2], expected[0][:3]]
    assert [answer.tokens.tolist() for answer in answers] == [expected[0][:3], expected[1]]
    assert passes.events[: passes.events.index((1,))] == [40, (0,), "step", (0,), "step", (0,), 40]


def test_a_listener_that_returns_nothing_only_listens():
    model, heard = QWEN2.build(), []
    prompt = QWEN2.inputs(model, [40])
    (answer,) = run(model, [Request(prompt, on_tokens=lambda tokens: heard.append(len(tokens)))], max_new_tokens=4)
    assert answer.tokens.tolist() == alone(model, prompt, 4)
    assert heard == [1, 2, 3, 4]


def test_a_listener_that_raises_ends_its_request_alone():
    model = QWEN2.build()
    prompts = [QWEN2.inputs(model, [40], seed=seed) for seed in range(2)]
    requests = [Request(prompts[0], on_tokens=lambda tokens: 1 / (2 - len(tokens)) < 0), Request(prompts[1])]
    answers = run(model, requests, max_new_tokens=6)
    assert isinstance(answers[0].error, ZeroDivisionError)
    assert answers[1].tokens.tolist() == alone(model, prompts[1], 6)


def test_an_error_that_is_kept_keeps_no_tensors_of_its_pass():
    model, held = QWEN2.build(), []

    def fails(module, args, kwargs):
        large = torch.zeros(10)
        held.append(weakref.ref(large))
        raise ValueError(large.shape)

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fails, with_kwargs=True)
    (answer,) = run(model, [Request(QWEN2.inputs(model, [40]))], max_new_tokens=2)
    handle.remove()
    assert isinstance(answer.error, ValueError)
    assert held[0]() is None
    assert "in fails" in "".join(traceback.format_exception(answer.error))


def test_requests_may_be_a_queue_that_has_none_for_a_while():
    model = QWEN2.build()
    prompts = [QWEN2.inputs(model, [40], seed=seed) for seed in range(3)]
    queue = prompts[:1]

    class Queue:
        def __iter__(self):
            return self

        def __next__(self):
            if not queue:
                raise StopIteration
            return queue.pop(0)

    with kvcompress.compress(model, "snapkv", 0.3) as session:
        steps = session.generate_many(Queue(), 2, max_new_tokens=6, do_sample=False).by_step()
        assert [next(steps) for _ in range(2)] == [[], []]
        queue += prompts[1:]
        answers = [answer for done in steps for answer in done]
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert [answer.tokens.tolist() for answer in answers] == [alone(model, prompt, 6) for prompt in prompts]
