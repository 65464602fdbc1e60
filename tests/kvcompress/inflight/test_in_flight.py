"""Requests in flight: each gets the tokens that it gets alone, whatever the others are."""

import gc
import itertools
import pkgutil
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import BaseStreamer

import kvcompress
from kvcompress import KVCompressError, Request
from kvcompress.clusters.knorm import KnormKVCluster
from kvcompress.hooks.resumed_prompt import ResumedPrompt
from kvcompress.inflight import request_state
from kvcompress.inflight.pool import SlotPool
from kvcompress.tokens import TokenMethod
from tests.support.answers import attending_by
from tests.support.calibrations import calibration_of
from tests.support.examples import examples, paired, some
from tests.support.families import FAMILIES, MORE_FAMILIES
from tests.support.in_flight import OutOfMemory, check_in_flight, tokens_alone, with_end
from tests.support.strategies import METHODS, SOME_METHODS, TIED, cases
from tests.support.token_methods import video_batch

NEW = (4, 6, 1, 5, 2)
EVICTING = {"decode_budget": 12, "decode_interval": 3}
NOT_RETURNED = (
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    "return_dict_in_generate",
)


def requests_of(family: str, lengths=(40, 23, 61, 35, 50), layers=None) -> tuple[torch.nn.Module, list[dict]]:
    made = (FAMILIES | MORE_FAMILIES)[family]
    model = made.build(layers)
    images = [i % 2 if made.is_vlm else 0 for i in range(len(lengths))]
    return model, [made.inputs(model, [n], [k], seed=n) for n, k in zip(lengths, images, strict=True)]


@given(data=st.data())
@examples(6)
def test_a_requests_logits_are_those_that_it_gets_alone(data):
    case = data.draw(cases(data.draw(st.sampled_from(list(FAMILIES))), max_batch=4))
    method = "snapkv" if case.method in TIED else case.method
    options = dict(case.options) if method == case.method else {}
    if data.draw(st.booleans()):
        options |= {"decode_budget": data.draw(st.integers(1, 40)), "decode_interval": data.draw(st.integers(1, 6))}
    images = case.images or [0] * len(case.lengths)
    pairs = zip(case.lengths, images, strict=True)
    requests = [case.family.inputs(case.model, [n], [k] if k else None, case.seed) for n, k in pairs]
    new = [data.draw(st.integers(1, 9)) for _ in requests]
    options |= {"prefill_tokens": data.draw(st.none() | st.integers(1, 30)), "slots": data.draw(st.integers(1, 3))}
    if data.draw(st.booleans()):
        options["prefix_cache"] = kvcompress.PrefixCache(gb=1)
        requests.append(with_end(requests[0], 3))
        new.append(3)
    check_in_flight(case.model, requests, new, method, ratio=None if method == "full" else case.ratio, **options)


@pytest.mark.parametrize(("method", "family"), some(paired(METHODS, list(FAMILIES)), SOME_METHODS))
def test_every_method_evicts_in_flight_as_alone(method, family):
    model, requests = requests_of(family)
    options = {"ratio": 0.3, "prefill_tokens": (None, 24), **EVICTING}
    check_in_flight(model, requests[:4], NEW[:4], method, 1 if method in TIED else 2, **options)


@pytest.mark.parametrize(
    "method",
    some(
        [name for name, info in kvcompress.list_methods().items() if issubclass(info.cls, TokenMethod)],
        ["fastv", "dycoke"],
    ),
)
def test_token_methods_in_flight_are_as_alone(method):
    sees = kvcompress.list_methods()[method].cls.sees
    model, requests = requests_of({"tower": "llava-1.5", "video": "llava-onevision"}.get(sees, "qwen2-vl"))
    # Some drop no tokens of images; dycoke's second stage hides some, by what a layer before attends to.
    options = {"ratio": 1.0 if method in ("dycoke", "evs", "fastvid", "holitom", "vidcom2") else 0.5}
    options |= {"layer": 1} if method == "dycoke" else {}
    check_in_flight(model, requests[1::2], NEW[1::2], method, 2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"first_token": "compressed"},
        {"first_token": "compressed", **EVICTING},
        {"prefill_chunk": 16},
        {"scope": "context", "context_tokens": 20},
        {"head_budget": "adaptive", **EVICTING},
        {"head_budget": "adaptive", "cache_implementation": "static"},
        {"cache_implementation": "static"},
        {"layer_budget": "pyramid", **EVICTING},
        {"merge": "pivot", **EVICTING},
        {"decode_ratio": 0.2, "decode_interval": 2},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_every_option_of_the_engine_works_in_flight(options):
    model, requests = requests_of("qwen2-vl")
    check_in_flight(model, requests[:4], NEW[:4], "snapkv", 2, ratio=0.3, prefill_tokens=(None, 24), **options)


@pytest.mark.parametrize("head_budget", ["uniform", "adaptive-kvpress"])
def test_a_slot_grows_with_its_layers_share_of_the_decode_budget_where_nothing_is_evicted(head_budget):
    """A pyramid begins at a length that the answer reaches: until then its last layer keeps more than at the end."""
    model = FAMILIES["llama"].build()
    requests = [FAMILIES["llama"].inputs(model, [40])]
    options = {"variant": "kvpress", "window_size": 8, "head_budget": head_budget}
    check_in_flight(model, requests, [20], "pyramidkv", 1, ratio=0.6, decode_ratio=0.6, decode_interval=1, **options)


def test_a_slot_that_an_eviction_made_larger_stays_so_when_slots_are_made_for_a_longer_prompt(monkeypatch):
    """A head that gets most of a layer's budget only while decoding has entries behind the room for prompts."""

    def score(cluster, queries, keys, values, view):
        columns = view.stored.columns if view.is_decoding else torch.arange(keys.shape[2]).expand(keys.shape[:3])
        scores = columns.double().sin().float()
        scores[:, 0] += 10 * view.is_decoding
        return view.protect_recent(scores, 1)

    monkeypatch.setattr(KnormKVCluster, "score", score)
    model, requests = requests_of("qwen2", lengths=(40, 30, 150))
    evicting = {"head_budget": "adaptive", "safeguard": 0.0, "decode_budget": 30, "decode_interval": 4}
    asked = [Request(inputs, {"max_new_tokens": new}) for inputs, new in zip(requests, (60, 50, 4), strict=True)]
    found = answers_of(model, asked, 2, "knorm", session_options=evicting, static=True, do_sample=False)
    for answer, request in zip(found, asked, strict=True):
        how = {**request.options, "do_sample": False}
        assert answer.tokens.tolist() == tokens_alone(model, request.inputs, "knorm", 0.3, evicting, **how)


@pytest.mark.parametrize("family", some([*FAMILIES, *MORE_FAMILIES], ["gemma4", "qwen3-vl", "qwen2.5-vl", "qwen3.5"]))
def test_every_family_answers_in_flight_or_says_why_not(family):
    linear = "LinearAttentionLayer"
    refused = {"mllama": "cross-attention", "minicpm-v": linear, "qwen3.5": linear, "gemma4-e2b": "their own keys"}
    model, requests = requests_of(family)
    if family in refused:
        with pytest.raises(KVCompressError, match=refused[family]):
            check_in_flight(model, requests[:1], NEW[:1], "snapkv", 2, ratio=0.3)
        return
    check_in_flight(model, requests, NEW, "snapkv", 2, ratio=0.3, prefill_tokens=(None, 16))
    check_in_flight(model, requests, NEW, "full", 3)


def test_adaptive_heads_are_read_in_place_and_by_eager_attention():
    model, requests = requests_of("qwen2")
    with attending_by(model, "eager"):
        check_in_flight(model, requests, NEW, "adakv", 2, ratio=0.3, **EVICTING)


def answers_of(model, requests, slots=2, method="snapkv", ratio=0.3, session_options=None, **options):
    with kvcompress.compress(
        model, method, ratio, **(session_options or {}), **calibration_of(method, model)
    ) as session:
        return sorted(session.generate_many(requests, slots=slots, **options), key=lambda answer: answer.index)


def test_an_answer_ends_with_its_end_token_and_its_slot_is_taken_at_once():
    model, requests = requests_of("qwen2")
    full = [tokens_alone(model, inputs, max_new_tokens=12, do_sample=False) for inputs in requests]
    ends = full[0][3]
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(requests, slots=2, max_new_tokens=12, do_sample=False, eos_token_id=ends)
        answers = {answer.index: answer.tokens.tolist() for answer in run}
    for index, tokens in enumerate(full):
        stop = tokens.index(ends) + 1 if ends in tokens else 12
        assert answers[index] == tokens[:stop]
    fed = sum(len(tokens) - 1 for tokens in answers.values())
    assert fed / 2 <= run.steps < fed  # two at a time, as long as there are two


def test_answers_come_as_soon_as_they_are_done_and_requests_are_asked_for_when_there_is_a_slot():
    model, requests = requests_of("qwen2")
    asked = []

    def source():
        for index, inputs in enumerate(requests):
            asked.append(index)
            yield Request(inputs, {"max_new_tokens": (30, 2, 3, 4, 5)[index]})

    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(source(), slots=2, do_sample=False)
        assert next(run).index == 1
        assert asked == [0, 1]
        assert [answer.index for answer in run] == [2, 3, 4, 0]
    assert [answer.index for answer in answers_of(model, [], max_new_tokens=3)] == []


def test_sampling_with_a_seed_draws_what_generate_draws_alone():
    model, requests = requests_of("qwen2-vl")
    how = {"do_sample": True, "temperature": 1.5, "top_k": 40, "max_new_tokens": 8}
    expected = []
    for seed, inputs in enumerate(requests):
        torch.manual_seed(seed)
        expected.append(tokens_alone(model, inputs, **how))
    found = answers_of(model, [Request(inputs, seed=seed) for seed, inputs in enumerate(requests)], **how)
    assert [answer.tokens.tolist() for answer in found] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_an_answer_is_as_long_as_its_request_says_or_else_the_run_or_else_the_session():
    model, (inputs, *_) = requests_of("qwen2")
    config = GenerationConfig(max_new_tokens=5)
    ways = {
        3: {"max_new_tokens": 3},
        4: {"max_length": inputs["input_ids"].shape[1] + 4},
        5: {"generation_config": config},
    }

    def lengths(*asked, **run):
        return [len(answer.tokens) for answer in answers_of(model, asked, session_options={"max_new_tokens": 7}, **run)]

    own = [Request(inputs, way) for way in ways.values()]
    assert lengths(inputs, *own) == [7, *ways]
    assert lengths(inputs, *own, max_new_tokens=6) == [6, *ways]
    assert lengths(inputs, *own, generation_config=GenerationConfig(max_new_tokens=6)) == [6, *ways]
    for most, way in ways.items():
        assert lengths(inputs, **way) == [most]


def test_processors_and_stop_strings_are_transformers_own():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model, requests = requests_of("qwen2")
    words = {**{f"w{i} ": i for i in range(127)}, "abcdef": 127}  # transformers looks how it joins words by that one
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0 ")))
    free = tokens_alone(model, requests[0], max_new_tokens=10, do_sample=False)
    how = {"do_sample": False, "max_new_tokens": 10, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    expected = [tokens_alone(model, inputs, **how) for inputs in requests]
    assert [answer.tokens.tolist() for answer in answers_of(model, requests, **how)] == expected
    stop = {"stop_strings": [f"w{free[4]} "], "tokenizer": tokenizer, "max_new_tokens": 10, "do_sample": False}
    expected = [tokens_alone(model, inputs, **stop) for inputs in requests]
    assert len(expected[0]) == free.index(free[4]) + 1
    found = answers_of(model, requests, **stop)
    assert [(answer.error, answer.tokens.tolist()) for answer in found] == [(None, tokens) for tokens in expected]
    config = GenerationConfig(stop_strings=stop.pop("stop_strings"), max_new_tokens=10, pad_token_id=0)
    found = answers_of(model, requests, generation_config=config, tokenizer=tokenizer, stopping_criteria=None)
    assert [(answer.error, answer.tokens.tolist()) for answer in found] == [(None, tokens) for tokens in expected]


def test_embeddings_in_place_of_ids_are_answered_and_counted_as_alone():
    model, requests = requests_of("qwen2")
    expected = [tokens_alone(model, inputs, max_new_tokens=5, do_sample=False) for inputs in requests]
    given = [{"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])} for inputs in requests]
    found = answers_of(model, given, max_new_tokens=5, do_sample=False)
    assert [(answer.error, answer.tokens.tolist()) for answer in found] == [(None, tokens) for tokens in expected]
    assert [answer.tokens_in for answer in found] == [inputs["input_ids"].shape[1] for inputs in requests]


class Fails(LogitsProcessor):
    """Raises at the n-th token."""

    def __init__(self, at: int):
        self.left = at

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise ValueError("this request is bad")
        return scores


def test_a_bad_request_ends_with_its_own_error_and_disturbs_no_other():
    model, requests = requests_of("qwen2")
    expected = [tokens_alone(model, inputs, max_new_tokens=8, do_sample=False) for inputs in requests]
    ids = requests[0]["input_ids"]
    bad = [
        {"input_ids": torch.cat([ids, ids]), "attention_mask": torch.ones(2, ids.shape[1])},
        {"input_ids": ids, "attention_mask": torch.cat([torch.zeros(1, 3), torch.ones(1, ids.shape[1] - 3)], 1)},
        {"input_ids": ids, "no_such_input": 1},
        Request({"input_ids": ids}, {"num_beams": 2}),
        Request({"input_ids": ids}, {"penalty_alpha": 0.6, "top_k": 4}),
        Request({"input_ids": ids}, {"prompt_lookup_num_tokens": 3}),
        Request({"input_ids": ids}, {"logits_processor": LogitsProcessorList([Fails(1)])}),
        Request({"input_ids": ids}, {"logits_processor": LogitsProcessorList([Fails(3)])}),
        {"input_ids": ids + 10**6},
        "input_ids",
        Request({"input_ids": ids}, {"dola_layers": "high"}),
        Request({"input_ids": ids}, {"assistant_model": model}),
        Request({"input_ids": ids}, {"streamer": BaseStreamer()}),
        *(Request({"input_ids": ids}, {name: True}) for name in NOT_RETURNED),
        Request({"input_ids": ids}, {"use_cache": False}),
    ]
    mixed = [each for pair in itertools.zip_longest(bad, requests) for each in pair if each is not None]
    found = answers_of(model, mixed, max_new_tokens=8, do_sample=False)
    right = [
        answer.tokens.tolist() for answer, asked in zip(found, mixed, strict=True) if any(asked is r for r in requests)
    ]
    assert right == expected
    errors = {id(bad[i]): i for i in range(len(bad))}
    said = {errors[id(asked)]: str(a.error) for a, asked in zip(found, mixed, strict=True) if id(asked) in errors}
    wrong = ["batch of 2", "pads", "no_such_input", "num_beams=2", "not by contrastive_search", "not by assisted"]
    for index, words in enumerate(wrong):
        assert words in said[index]
    assert said[6] == said[7] == "this request is bad"
    assert "not a str" in said[9]
    assert "not by dola" in said[10]
    for index, name in enumerate(("assistant_model", "streamer", *NOT_RETURNED), 11):
        assert f"{name}= does not go with requests in flight" in said[index]
    assert "use_cache is off" in said[len(bad) - 1]
    assert all(answer.error is None or not len(answer.tokens) for answer in found)


def test_memory_is_bounded_by_slots_times_budget_and_room():
    model, requests = requests_of("qwen2", lengths=[60, 33, 47, 58, 21, 40])
    with kvcompress.compress(model, "r-kv", budget=16, decode_budget=16, decode_interval=4) as session:
        run = session.generate_many(requests, slots=3, max_new_tokens=40, do_sample=False)
        assert len(list(run)) == 6
    config = model.config
    entry = 2 * config.num_key_value_heads * config.head_dim * 4 if hasattr(config, "head_dim") else 2 * 2 * 16 * 4
    entries = (16 + 4 + 1) * entry + 8 * 4 * 16 * 4 + (16 + 4) * 2 * 4  # with the latest queries and the columns
    one_prompt = (16 + 4) * entry + 8 * 4 * 16 * 4 + 60 * 16
    assert run.peak_kv_bytes <= config.num_hidden_layers * (3 * entries + one_prompt + 200)
    assert (run.slots, run.kv_bytes, run._cache) == (3, 0, None)  # nothing is held once all is answered


@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_kv_gb_says_how_many_slots_there_are_and_holds(method):
    model, requests = requests_of("qwen2", lengths=[30, 31, 29, 30, 64, 28, 30])
    limit = 120_000
    with kvcompress.compress(model, method, 0.5, **calibration_of(method, model)) as session:
        run = session.generate_many(requests, kv_gb=limit / 2**30, max_new_tokens=20, do_sample=False)
        slots, most, answers = [], 0, []
        for answer in run:
            answers.append(answer)
            slots.append(run.slots)
            most = max(most, run._cache.nbytes)
    assert [answer.error for answer in answers] == [None] * 7
    assert most <= limit * 1.01  # starts and lengths of the slots are not counted
    assert slots[0] > slots[-1] > 1  # the longer prompt needs larger ones
    expected = [tokens_alone(model, inputs, method, 0.5, max_new_tokens=20, do_sample=False) for inputs in requests]
    assert {answer.index: answer.tokens.tolist() for answer in answers} == dict(enumerate(expected))


@pytest.mark.parametrize("lengths", [[20, 120, 22], [120, 20, 22], [20, 22, 120]])
def test_a_request_that_kv_gb_cannot_hold_says_so_and_the_others_are_answered(lengths):
    model, requests = requests_of("qwen2", lengths=lengths)
    found = answers_of(model, requests, None, "full", None, kv_gb=40_000 / 2**30, max_new_tokens=4, do_sample=False)
    assert [answer.error is None for answer in found] == [length < 100 for length in lengths]
    assert "more than kv_gb=" in str(found[lengths.index(120)].error)


def test_a_long_request_leaves_the_later_ones_as_many_slots_as_they_had():
    model, requests = requests_of("qwen2", lengths=[20, 22, 100, 21, 20, 22])
    with kvcompress.compress(model, "full") as session:
        run = session.generate_many(requests, kv_gb=90_000 / 2**30, max_new_tokens=4, do_sample=False)
        slots = {answer.index: run.slots for answer in run}
    assert slots[2] == 1
    assert slots[0] == slots[5] > 2


FAILING = [("request_state.prepare", (3,)), ("layer.SlotLayer.update", (8,)), ("layer.SlotLayer._evict", (8,))]
# Some layers already have the new slots when memory runs out.
FAILING += [(f"layer.SlotLayer.{name}", at) for name in ("resize", "fill") for at in ((1,), (2,), (7,), (8,), (4, 6))]
GREEDY = {"session_options": EVICTING, "max_new_tokens": 10, "do_sample": False}


@pytest.fixture(scope="module")
def answered() -> tuple[torch.nn.Module, list[dict], list[list[int]]]:
    """A model, requests, and what each gets alone."""
    model, requests = requests_of("qwen2", lengths=[40, 23, 61, 35, 150, 30])
    return model, requests, [tokens_alone(model, inputs, **GREEDY) for inputs in requests]


@pytest.mark.parametrize(("name", "at"), FAILING)
def test_where_memory_does_not_suffice_the_slots_are_halved_and_no_token_changes(answered, monkeypatch, name, at):
    model, requests, expected = answered
    memory, target = OutOfMemory(*at), f"kvcompress.inflight.{name}"
    monkeypatch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
    heard = [[] for _ in requests]
    listening = [
        Request(one, on_tokens=lambda tokens, of_one=of_one: of_one.append(list(tokens)))
        for one, of_one in zip(requests, heard, strict=True)
    ]
    with kvcompress.compress(model, "snapkv", 0.3, **EVICTING) as session:
        run = session.generate_many(listening, slots=4, max_new_tokens=10, do_sample=False)
        found = {answer.index: answer.tokens.tolist() for answer in run}
    for of_one, tokens in zip(heard, expected, strict=True):  # a request without its slot begins again
        assert of_one[-len(tokens) :] == [tokens[: n + 1] for n in range(len(tokens))]
    assert memory.calls > max(at)
    assert run.halved == len(at)
    assert run.tokens == sum(map(len, expected))  # those of a lost slot do not count twice
    assert found == dict(enumerate(expected))
    memory.at = (memory.calls + 1,)
    with pytest.raises(torch.OutOfMemoryError):
        answers_of(model, requests, 4, **GREEDY, on_oom="raise")


class LittleMemory(TorchDispatchMode):
    """Memory runs out in the operation that follows `operations` others; those that write in place need none."""

    def __init__(self, operations: int):
        super().__init__()
        self.left = operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function._schema.is_mutable:
            if not self.left:
                raise torch.OutOfMemoryError("no more")
            self.left -= 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("operations", [0, 8, 16])
@pytest.mark.parametrize("options", [{"merge": "d2o"}, {"positions": "cache"}, {"head_budget": "adaptive"}], ids=str)
def test_an_eviction_that_ran_out_of_memory_is_tried_again_from_what_was_there(monkeypatch, options, operations):
    model, requests = requests_of("qwen2", lengths=[40, 23, 61, 35])
    options, place, calls = {**EVICTING, **options}, SlotPool.place, iter(range(10**6))

    def failing(self, slots, kept, counts):
        is_eviction = slots[0] in self._placed  # else a prompt's
        with LittleMemory(operations) if is_eviction and next(calls) == 6 else nullcontext() as little:
            place(self, slots, kept, counts)
        assert little is None, "memory sufficed"

    expected = [tokens_alone(model, one, session_options=options, max_new_tokens=12) for one in requests]
    monkeypatch.setattr(SlotPool, "place", failing)
    found = answers_of(model, requests, 4, session_options=options, max_new_tokens=12)
    assert next(calls) > 7
    assert [answer.tokens.tolist() for answer in found] == expected


def test_an_eviction_is_tried_again_with_each_sequence_s_own_position(monkeypatch):
    """Slots are numbered anew before it, in the order in which they were filled."""
    model, requests = requests_of("qwen2", lengths=[40, 30, 200, 60, 90])
    new = [7, 20, 20, 20, 20]  # the last takes the first's slot
    how = {"method": "expected-attention", "session_options": {"decode_budget": 12, "decode_interval": 5}}
    expected = [tokens_alone(model, one, max_new_tokens=n, **how) for one, n in zip(requests, new, strict=True)]
    target = "kvcompress.inflight.layer.SlotLayer._replace"
    for at in (7, 13, 22):
        memory = OutOfMemory(at)
        with monkeypatch.context() as patch:
            patch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
            asked = [Request(one, {"max_new_tokens": n}) for one, n in zip(requests, new, strict=True)]
            found = answers_of(model, asked, 4, **how)
        assert memory.calls > at
        assert [answer.tokens.tolist() for answer in found] == expected


@pytest.mark.parametrize("slots", [1, 3])
def test_where_memory_does_not_suffice_to_sample_the_slots_are_halved_too(monkeypatch, slots):
    model, requests = requests_of("qwen2")
    how = {"do_sample": True, "top_k": 1, "max_new_tokens": 6}
    expected = [tokens_alone(model, one, **how) for one in requests]
    memory, target = OutOfMemory(9), "kvcompress.inflight.request.TokenSampler.next_token"
    monkeypatch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
    found = answers_of(model, requests, slots, **how)
    failed = [answer.index for answer in found if answer.error is not None]
    assert failed == ([1] if slots == 1 else [])
    assert all(answer.tokens.tolist() == expected[answer.index] for answer in found if answer.index not in failed)
    memory.at = (memory.calls + 9,)
    with pytest.raises(torch.OutOfMemoryError):
        answers_of(model, requests, slots, **how, on_oom="raise")


def test_a_run_that_is_closed_holds_nothing():
    model, requests = requests_of("qwen2")
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(requests, slots=2, max_new_tokens=9)
        next(run.by_step())
        assert run.kv_bytes > 0
        run.close()
        assert run.kv_bytes == 0 < run.peak_kv_bytes
        assert list(run) == []


def test_a_step_that_ran_out_of_memory_is_tried_again_with_the_attention_before_it(monkeypatch):
    model, inputs, _ = video_batch("llava-onevision", [8])
    options, memory = {"session_options": {"layer": 1}, "method": "dycoke", "ratio": 1.0}, OutOfMemory(4, 14)
    target = "kvcompress.inflight.layer.SlotLayer.update"
    expected = tokens_alone(model, inputs, max_new_tokens=8, **options)
    monkeypatch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
    found = answers_of(model, [inputs] * 4, 4, max_new_tokens=8, **options)
    assert [answer.tokens.tolist() for answer in found] == [expected] * 4


def test_a_run_that_broke_off_says_so_again_and_holds_nothing(monkeypatch):
    model, requests = requests_of("qwen2")
    memory, target = OutOfMemory(8), "kvcompress.inflight.layer.SlotLayer.update"
    monkeypatch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(requests, slots=2, max_new_tokens=9, on_oom="raise")
        with pytest.raises(torch.OutOfMemoryError):
            list(run)
        with pytest.raises(KVCompressError, match=r"these requests broke off \(OutOfMemoryError: no more\)"):
            next(run)
    assert run.kv_bytes == 0 < run.peak_kv_bytes


@pytest.mark.parametrize("name", ["resize", "fill"])
def test_a_slot_that_memory_does_not_hold_alone_ends_its_request_with_that_error(monkeypatch, name):
    model, requests = requests_of("qwen2")
    target = f"kvcompress.inflight.layer.SlotLayer.{name}"
    memory = OutOfMemory(*range(1, 10**6))
    with monkeypatch.context() as patch:
        patch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
        found = answers_of(model, requests, slots=4, max_new_tokens=6, do_sample=False)
    assert [type(answer.error) for answer in found] == [torch.OutOfMemoryError] * len(requests)


def test_a_slot_that_memory_never_held_leaves_the_others_as_many_as_there_were(monkeypatch):
    model, requests = requests_of("qwen2")
    target, memory = "kvcompress.inflight.layer.SlotLayer.fill", OutOfMemory(1, 2, 3)  # in 4 slots, in 2, and alone
    monkeypatch.setattr(target, memory.failing(pkgutil.resolve_name(target)))
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(requests, slots=4, max_new_tokens=6, do_sample=False)
        found = sorted(run, key=lambda answer: answer.index)
    assert [type(answer.error) for answer in found if answer.error] == [torch.OutOfMemoryError]
    assert run.slots == 4


def test_a_request_alone_that_memory_does_not_hold_ends_with_that_error(monkeypatch):
    model, requests = requests_of("qwen2")
    original = request_state.prepare

    def prepare(model, request, *args):
        if request.inputs["input_ids"].shape[1] > 55:
            raise torch.OutOfMemoryError("no more")
        return original(model, request, *args)

    monkeypatch.setattr(request_state, "prepare", prepare)
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(requests, slots=4, max_new_tokens=6, do_sample=False)
        found = sorted(run, key=lambda answer: answer.index)
    assert [type(answer.error) for answer in found if answer.error] == [torch.OutOfMemoryError]
    assert [len(answer.tokens) for answer in found] == [6, 6, 0, 6, 6]
    assert run.halved > 0
    assert run.slots == 4  # again: no number of slots could answer it


@pytest.mark.parametrize("evicting", [{}, EVICTING], ids=["keeping", "evicting"])
def test_a_step_is_one_graph_and_filling_or_freeing_a_slot_compiles_nothing(evicting):
    model, requests = requests_of("qwen2", layers=1)
    how = {"slots": 2, "max_new_tokens": 8, "do_sample": False}
    how |= {"session_options": {"budget": 12, **evicting}, "ratio": None}
    expected = answers_of(model, requests, **how)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode="default")  # transformers' own path
    config._compile_all_devices = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = answers_of(model, requests, static=True, compile_config=config, **how)
    del model._compiled_call
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [answer.tokens.tolist() for answer in found] == [answer.tokens.tolist() for answer in expected]


def test_what_an_answer_says_of_its_cost_is_its_own():
    model, requests = requests_of("qwen2-vl")
    held = {}
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(
            requests,
            slots=2,
            max_new_tokens=4,
            do_sample=False,
            after_prompt=lambda index, cache: held.update({index: cache.kept_indices(0)}),
        )
        answers = sorted(run, key=lambda answer: answer.index)
    for answer, inputs in zip(answers, requests, strict=True):
        length = inputs["input_ids"].shape[1]
        assert answer.tokens_in == length
        assert answer.realised_ratios == pytest.approx([0.3] * 3, abs=1 / length)
        kept = len(held[answer.index][0][0])
        assert kept == int(0.3 * length + 0.5)
        assert answer.kv_bytes_prompt == 3 * kept * 2 * (2 * 16 * 4 + 4)  # layers, heads, keys and values, index
        assert min(answer.ttft_s, answer.tpot_s) > 0
    assert answers[0].waited_s < 0.01 < answers[-1].waited_s
    assert run.tokens == 4 * 5
    assert run.peak_kv_bytes > 0


def test_answers_are_timed_by_the_clock_of_their_run():
    model, requests = requests_of("qwen2")
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        run = session.generate_many(requests, slots=2, max_new_tokens=4, do_sample=False)
        run.clock = lambda: 7.0
        for answer in run:
            assert answer.waited_s == answer.ttft_s == answer.tpot_s == answer.pause_s == 0


def test_a_wrong_argument_is_one_line_before_anything_runs():
    model, requests = requests_of("qwen2")
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        for wrong, said in [
            ({}, "give slots="),
            ({"slots": 0}, "slots=0"),
            ({"slots": True}, "slots=True"),
            ({"kv_gb": 0.0}, "kv_gb=0.0"),
            ({"slots": 2, "on_oom": "wait"}, "on_oom='wait'"),
            ({"slots": 2, "prefill_tokens": 0}, "prefill_tokens=0 is not an integer of at least 1: it counts tokens"),
            ({"slots": 2, "prefill_tokens": -3}, "prefill_tokens=-3"),
            ({"slots": 2, "prefill_tokens": "512"}, "prefill_tokens='512'"),
            ({"slots": 2, "prefill_tokens": True}, "prefill_tokens=True"),
        ]:
            with pytest.raises(KVCompressError, match=said):
                session.generate_many(requests, **wrong)
    offloaded = kvcompress.compress(model, "snapkv", 0.3, cache_implementation="offloaded")
    with offloaded as session, pytest.raises(KVCompressError, match="'offloaded'; dynamic and static do"):
        session.generate_many(requests, slots=2)
    with kvcompress.attach(model) as session, pytest.raises(KVCompressError, match="need compress"):
        session.generate_many(requests, slots=2)


def test_the_sessions_cache_stays_that_of_the_latest_prompt_and_generate_goes_on_working():
    model, requests = requests_of("qwen2")
    expected = tokens_alone(model, requests[0], max_new_tokens=5, do_sample=False)
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        list(session.generate_many(requests, slots=2, max_new_tokens=4, do_sample=False))
        again = model.generate(**requests[0], max_new_tokens=5, do_sample=False)
        assert again[0, requests[0]["input_ids"].shape[1] :].tolist() == expected
        assert isinstance(session.cache, kvcompress.CompressedCache)


def readers() -> list[ResumedPrompt]:
    return [each for each in gc.get_objects() if type(each) is ResumedPrompt]


def test_bytes_after_the_prompt_are_those_of_its_entries_and_what_read_it_is_gone():
    model, requests = requests_of("qwen2", lengths=(140, 123))
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    entry = 2 * 4 * config.hidden_size // config.num_attention_heads + 4  # bytes: key and value in fp32, position
    evicting = {"decode_budget": 80, "decode_interval": 6}  # with room for six tokens
    before = {id(each) for each in readers()}
    with kvcompress.compress(model, "streamingllm", budget=80, **evicting) as session:
        asked = [Request(inputs, {"max_new_tokens": new}) for inputs, new in zip(requests, (5, 9), strict=True)]
        run = session.generate_many(asked, 2, prefill_tokens=124, do_sample=False)
        first = next(answers := iter(run))
        assert {id(each) for each in readers()} <= before  # while the other decodes
        for answer in (first, *answers):
            assert answer.kv_bytes_prompt == heads * 80 * entry
