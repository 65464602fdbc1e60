"""Continuous batching on compressed pages: each request gets the tokens that it gets alone, in bounded memory."""

import copy
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import ContinuousBatchingConfig, GenerationConfig, MistralConfig, MistralForCausalLM
from transformers.generation.continuous_batching import continuous_api

import kvcompress
from kvcompress import paged
from kvcompress.errors import KVCompressError
from kvcompress.hooks.attention import one_query_per_head
from kvcompress.paged import attention
from kvcompress.paged.compressor import PagedCompressor
from kvcompress.policy.conflicts import PAGES, check_conflicts
from kvcompress.policy.make import make_policy
from kvcompress.policy.policy import Policy
from kvcompress.scoring.merging import MERGES
from tests.support.answers import attending_by
from tests.support.calibrations import calibration_of
from tests.support.docs import DOCS, python_blocks
from tests.support.examples import examples, some
from tests.support.families import FAMILIES, FIRST_TEXT, MORE_FAMILIES, VOCAB_SIZE
from tests.support.strategies import METHODS, OPTIONS

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

GREEDY = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=12)
TWICE = copy.deepcopy(GREEDY)
TWICE.num_return_sequences = 2  # which its constructor refuses without sampling
EVICTING = {"budget": 9, "decode_budget": 9, "decode_interval": 2}
EVEN = {"layer_budget": "uniform", "head_budget": "uniform"}


def policy_of(method: str, **arguments: object) -> Policy:
    return make_policy(method, **arguments, **calibration_of(method, FAMILIES["qwen2"].build(2)))


def lives_in_pages(method: str, **options: object) -> bool:
    try:
        check_conflicts(policy_of(method, ratio=0.5, **options), PAGES)
    except KVCompressError:
        return False
    return True


LIVING = [method for method in METHODS if lives_in_pages(method, **EVEN)]
BY_THEMSELVES = [method for method in LIVING if lives_in_pages(method)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A manager that stops looks for garbage twice, most of the time of a test."""
    monkeypatch.setattr(continuous_api, "gc", SimpleNamespace(collect=lambda: None))


@dataclass(frozen=True)
class Case:
    """Requests, how they are compressed, and the pages that they get."""

    method: str
    arguments: tuple[tuple[str, Any], ...]
    prompts: tuple[tuple[int, ...], ...]
    new: tuple[int, ...]
    page_size: int
    pages: int
    batch_tokens: int

    @property
    def policy(self) -> Policy:
        return policy_of(self.method, **dict(self.arguments))

    @property
    def config(self) -> ContinuousBatchingConfig:
        return pages_config(self.page_size, self.pages, self.batch_tokens)


def pages_config(page_size: int, pages: int, batch_tokens: int = 64, **options: object) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(page_size=page_size, num_blocks=pages, max_batch_tokens=batch_tokens, **options)


def bound(policy: Policy, prompt: int, new: int) -> int:
    """Entries that a request may come to hold: all of its prompt, then what is kept and what comes before an eviction,
    the last token never."""
    kept = policy.budget(prompt)
    most = kept + new - 1
    if policy.decode is not None:
        most = min(most, max(kept, policy.decode(prompt + new)) + policy.decode_interval)
    return max(prompt, most)


@st.composite
def cases(draw: st.DrawFn, methods: Sequence[str] = LIVING, requests: int = 5, longest: int = 50) -> Case:
    """Any method that lives in pages, with any of its options; some requests more than fit, some prompts in chunks."""
    method = draw(st.sampled_from(methods))
    arguments: dict[str, Any] = {name: draw(st.sampled_from(of)) for name, of in OPTIONS.get(method, {}).items()}
    arguments |= draw(st.sampled_from([{"ratio": 0.3}, {"ratio": 1.0}, {"budget": 6}, {"budget": 20}]))
    arguments |= draw(st.sampled_from([{}, {"decode_ratio": 0.4}, {"decode_budget": 9}, {"decode_budget": 20}]))
    arguments |= {"decode_interval": draw(st.sampled_from([None, 1, 3, 5])), "head_budget": draw(heads)}
    if method not in BY_THEMSELVES:
        arguments |= EVEN
    if draw(st.integers(0, 3)) == 0:
        arguments["merge"] = draw(st.sampled_from(sorted(MERGES)))
    ids = st.integers(FIRST_TEXT, VOCAB_SIZE - 1)
    # Two keys are equally like their mean: rounding decides which one keydiff keeps.
    prompts = draw(st.lists(st.lists(ids, min_size=3, max_size=longest).map(tuple), min_size=2, max_size=requests))
    new = tuple(draw(st.integers(1, GREEDY.max_new_tokens)) for _ in prompts)
    page_size = draw(st.sampled_from([4, 8, 16]))
    policy = policy_of(method, **arguments)
    needed = [ceil(bound(policy, len(prompt), n) / page_size) for prompt, n in zip(prompts, new, strict=True)]
    pages = draw(st.sampled_from([max(needed), max(needed) + 2, sum(needed)]))
    given = tuple(arguments.items())
    return Case(method, given, tuple(prompts), new, page_size, pages, draw(st.sampled_from([16, 64])))


heads = st.sampled_from([None, "uniform", "shared"])


def alone(model: torch.nn.Module, prompt: Sequence[int], new: int, method: str, **arguments: object) -> list[int]:
    ids = torch.tensor([prompt])
    with kvcompress.compress(model, method, **arguments):
        answer = model.generate(ids, GREEDY, attention_mask=torch.ones_like(ids), max_new_tokens=new)
    return answer[0, len(prompt) :].tolist()


def answers(model: torch.nn.Module, config: ContinuousBatchingConfig, prompts, new: Sequence[int]) -> list[list[int]]:
    """Of all requests at once, in their order."""
    found = {}
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=config) as manager:
        requests = list(zip(prompts, new, strict=True))
        names = [manager.add_request(list(prompt), max_new_tokens=n) for prompt, n in requests]
        while len(found) < len(names):
            answer = manager.get_result(timeout=5)
            assert answer is not None, "the generation loop has died"
            assert answer.error is None, answer.error
            found[answer.request_id] = answer.generated_tokens
    return [found[name] for name in names]


def check(model: torch.nn.Module, case: Case) -> None:
    arguments = dict(case.arguments) | calibration_of(case.method, model)
    expected = [
        alone(model, prompt, n, case.method, **arguments) for prompt, n in zip(case.prompts, case.new, strict=True)
    ]
    with paged.compress(model, case.method, **arguments) as session:
        assert answers(model, case.config, case.prompts, case.new) == expected
    assert session.pages_in_use == 0
    assert 0 < session.peak_pages <= case.pages


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(FIRST_TEXT, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@given(case=cases(longest=30, requests=4))
@examples(4)
def test_a_request_gets_the_tokens_that_it_gets_alone(case):
    # Of keys of one token, all as like their mean as each other, rounding chooses.
    assume(case.method != "keydiff" or all(len({*prompt}) > 2 for prompt in case.prompts))
    check(FAMILIES["qwen2"].build(2), case)


@pytest.mark.parametrize("method", some(LIVING, few=[]))
def test_every_method_that_lives_in_pages_gives_the_tokens_of_requests_alone(method):
    @given(case=cases([method]))
    @examples(4)
    def check_method(case):
        check(FAMILIES["llama"].build(), case)

    check_method()


LONG_ANSWERS = {
    "snapkv": {"window_size": 12, "decode_interval": 3},  # queries from before the eviction before
    "h2o": {"decode_interval": 2},  # sums that are carried on
    "expected-attention": {"window_size": 4, "decode_interval": 3},  # queries before their rotation
    "d2o": {"layer_budget": "uniform", "decode_interval": 3},  # merging, from a threshold on
    "tova": {},  # at every step
}


@pytest.mark.parametrize("method", some(LONG_ANSWERS, few=["h2o", "tova"]))
def test_long_answers_are_evicted_again_and_again_as_alone(method):
    arguments = LONG_ANSWERS[method] | {"budget": 14, "decode_budget": 14}
    prompts = tuple(map(tuple, prompts_of(9, 26, 5)))
    check(FAMILIES["qwen2"].build(2), Case(method, tuple(arguments.items()), prompts, (36, 30, 36), 8, 9, 32))


@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
def test_other_attention_implementations(implementation, fake_flash_attn):
    model = FAMILIES["qwen2"].build(2)
    prompts = prompts_of(20, 7)
    expected = [alone(model, prompt, 12, "tova", **EVICTING) for prompt in prompts]
    with attending_by(model, implementation):
        with paged.compress(model, "tova", **EVICTING):
            assert answers(model, pages_config(8, 9), prompts, [12, 12]) == expected
        assert model.config._attn_implementation == implementation


def test_a_request_holds_the_rotation_of_its_prompt_until_all_layers_have_read_it(monkeypatch):
    model, prompts, evict, held = FAMILIES["qwen2"].build(2), prompts_of(40, 23), PagedCompressor._evict, []

    def noting(self, group, *args):
        held.extend(request.rotary for request in group.requests)
        return evict(self, group, *args)

    monkeypatch.setattr(PagedCompressor, "_evict", noting)
    with paged.compress(model, "expected-attention", **EVICTING, **EVEN):
        assert all(answers(model, pages_config(8, 20, 16), prompts, [12, 12]))
    assert held == [[]] * len(held) != []


def test_layers_with_a_sliding_window_keep_their_pages():
    model = MORE_FAMILIES["gemma3"].build()
    arguments, prompts, new = {"budget": 5, "decode_budget": 5, "decode_interval": 2}, prompts_of(6, 7, 6, 20), [10] * 4
    expected = [alone(model, prompt, 10, "keydiff", **arguments) for prompt in prompts]
    with paged.compress(model, "keydiff", **arguments):
        for pages in (7, 9):  # two requests at once, and more; the windows are longer than what else is kept
            assert answers(model, pages_config(4, pages, 16), prompts, new) == expected


def test_the_same_prompt_twice_and_several_answers_to_one():
    model, (prompt,) = FAMILIES["qwen2"].build(2), prompts_of(40)
    expected = alone(model, prompt, 12, "snapkv", **EVICTING)
    with paged.compress(model, "snapkv", **EVICTING) as session:
        found = model.generate_batch([prompt, prompt], TWICE, continuous_batching_config=pages_config(8, 40, 32))
        assert [answer.generated_tokens for answer in found.values()] == [expected] * 4
        assert session.pages_in_use == 0


@given(
    case=cases(longest=30, requests=3),
    shared=st.integers(1, 40),
    gb=st.sampled_from([1.0, 20e-6]),
    spare=st.sampled_from([0, 3, 200]),
)
@examples(4)
def test_requests_that_begin_alike_share_the_prefill_and_get_the_tokens_that_they_get_alone(case, shared, gb, spare):
    assume(case.method != "keydiff" or all(len({*prompt}) > 2 for prompt in case.prompts))
    model, prefixes = FAMILIES["qwen2"].build(2), kvcompress.PrefixCache(gb=gb)
    arguments = dict(case.arguments) | calibration_of(case.method, model)
    beginning = prompts_of(shared)[0]
    prompts = [beginning + list(prompt) for prompt in case.prompts] * 2
    new, config = case.new * 2, pages_config(case.page_size, 200, case.batch_tokens)
    expected = [alone(model, prompt, n, case.method, **arguments) for prompt, n in zip(prompts, new, strict=True)]
    with paged.compress(model, case.method, **arguments, prefix_cache=prefixes) as session:
        assert answers(model, config, prompts, new) == expected
        assert session.pages_in_use == 0
        first = prefixes.reused_tokens
        assert answers(model, config, prompts[:1], new[:1]) == expected[:1]
    assert prefixes.prompt_tokens == sum(map(len, prompts)) + len(prompts[0])
    assert prefixes.nbytes <= gb * 2**30
    if gb == 1.0:
        assert prefixes.reused_tokens == first + len(prompts[0]) - 1


@pytest.mark.parametrize("method", ["snapkv", "h2o", "expected-attention", "keydiff"])
def test_a_request_with_a_known_beginning_reads_only_the_rest(method):
    model, prefixes = FAMILIES["qwen2"].build(2), kvcompress.PrefixCache(gb=1)
    beginning, *questions = prompts_of(60, 5, 7, 6)
    prompts, read = [beginning + question for question in questions], []
    expected = [alone(model, prompt, 6, method, **EVICTING) for prompt in prompts]
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[-1]), with_kwargs=True
    )
    with paged.compress(model, method, **EVICTING, prefix_cache=prefixes), handle:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert answers(model, pages_config(8, 40), [prompt], [6]) == [tokens]
    assert [tokens for tokens in read if tokens > 1] == [64, 7, 6]  # and decoded tokens one by one
    assert (prefixes.prompt_tokens, prefixes.reused_tokens) == (60 * 3 + 18, 120)


def test_several_answers_to_one_prompt_start_after_its_known_beginning():
    model, (prompt,) = FAMILIES["qwen2"].build(2), prompts_of(40)
    expected, prefixes = alone(model, prompt, 12, "snapkv", **EVICTING), kvcompress.PrefixCache(gb=1)
    with paged.compress(model, "snapkv", **EVICTING, prefix_cache=prefixes):
        for _ in range(2):
            found = model.generate_batch([prompt], TWICE, continuous_batching_config=pages_config(8, 40, 64))
            assert [answer.generated_tokens for answer in found.values()] == [expected] * 2
    assert prefixes.reused_tokens == 38


def test_a_manager_that_outlasts_an_adapter_shares_nothing_of_it():
    model, prompts = FAMILIES["qwen2"].build(2), prompts_of(40)
    model, prefixes = copy.deepcopy(model), kvcompress.PrefixCache(gb=1)
    projection = model.model.layers[0].self_attn.q_proj
    projection.base_layer, projection.active_adapters = torch.nn.Identity(), ["default"]
    with paged.compress(model, "snapkv", budget=9, prefix_cache=prefixes):
        for adapter, reused in (("default", 0), ("other", 0), ("other", 39)):
            projection.active_adapters = [adapter]
            model.generate_batch(
                prompts, GREEDY, continuous_batching_config=pages_config(8, 9), persistent_manager=True
            )
            assert prefixes.reused_tokens == reused


def test_layers_with_a_sliding_window_share_no_prefixes_and_say_so(caplog):
    model, (prompt,) = MORE_FAMILIES["gemma3"].build(), prompts_of(9)
    arguments, prefixes = {"budget": 5, "decode_budget": 5, "decode_interval": 2}, kvcompress.PrefixCache(gb=1)
    expected = alone(model, prompt, 6, "keydiff", **arguments)
    with paged.compress(model, "keydiff", **arguments, prefix_cache=prefixes):
        assert answers(model, pages_config(4, 9), [prompt] * 2, [6] * 2) == [expected] * 2
    assert "share no prefixes, because Gemma3ForConditionalGeneration has layers with a sliding window" in caplog.text
    assert prefixes.nbytes == 0


def test_a_decoded_token_meets_the_entries_of_its_own_request_alone(monkeypatch):
    model, met = FAMILIES["qwen2"].build(2), []

    def noted(query, key, *rest):
        met.append(key.shape)
        return one_query_per_head(query, key, *rest)

    monkeypatch.setattr(attention, "one_query_per_head", noted)
    with paged.compress(model, "keydiff", budget=8, decode_budget=8, decode_interval=4):
        answers(model, pages_config(4, 12), prompts_of(10, 20, 9), [9] * 3)
    assert {(shape[0], shape[2]) for shape in met} == {(3, entries) for entries in (9, 10, 11, 12)}


def test_as_many_requests_run_at_once_as_their_bounds_allow():
    model, prompts = FAMILIES["qwen2"].build(2), prompts_of(*[8] * 7)
    with paged.compress(model, "keydiff", budget=8, decode_budget=8, decode_interval=4) as session:
        answers(model, pages_config(4, 10), prompts, [30] * 7)  # each has 12 entries at most, 3 pages
        assert session.peak_pages == 9


def test_pages_of_a_long_prompt_are_free_once_it_is_through():
    model, prompts = FAMILIES["qwen2"].build(2), prompts_of(64, 64)
    with paged.compress(model, "snapkv", budget=8) as session:
        answers(model, pages_config(4, 24, 128), prompts, [20, 20])
        assert session.peak_pages == 16 + 7  # a prompt, and what is left of the other, with 19 tokens to come


@pytest.mark.parametrize("method", ["snapkv", "expected-attention"])
def test_a_manager_that_stops_frees_its_pages_and_the_next_one_has_all_memory(method):
    model, prompts = FAMILIES["qwen2"].build(2), prompts_of(20, 9)
    with paged.compress(model, method, budget=8) as session:
        for _ in range(2):
            answers(model, pages_config(4, 24), prompts, [4, 4])
            gc.collect()
            assert not [each for each in gc.get_objects() if type(each).__name__ == "CompressedPagedCache"]
            assert session.pages_in_use == 0 < session.peak_pages


def test_a_cancelled_request_frees_its_pages():
    model = FAMILIES["qwen2"].build(2)
    with paged.compress(model, "keydiff", budget=8, decode_budget=8) as session:
        manager = model.init_continuous_batching(GREEDY, pages_config(4, 20))
        manager.start()
        name = manager.add_request(prompts_of(8)[0], max_new_tokens=100_000)
        wait_until(lambda: session.pages_in_use == 6)  # 8 + 16 entries
        manager.cancel_request(name)
        wait_until(lambda: session.pages_in_use == 0)


def test_a_request_that_waits_for_pages_is_not_overtaken_by_smaller_ones():
    model, prompt = FAMILIES["qwen2"].build(2), prompts_of(8)[0]
    with paged.compress(model, "keydiff", budget=8):
        manager = model.init_continuous_batching(GREEDY, pages_config(4, 20))
        lengths = {"first": 40, "large": 60, "small": 4, "smaller": 2}  # of 20 pages 12, 17, 3 and 3
        for name, new in lengths.items():
            manager.add_request(prompt, name, max_new_tokens=new, streaming=True)
        manager.start()
        began, ended = [], 0
        while ended < len(lengths):
            output = manager.get_result(timeout=10)
            began += [output.request_id] if len(output.generated_tokens) == 1 else []
            ended += output.is_finished()
    assert began == [*lengths]


def wait_until(holds, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_leaving_restores_the_model_and_stops_its_managers():
    model = FAMILIES["qwen2"].build(2)
    with paged.compress(model, "tova", 0.5, decode_budget=8) as session:
        manager = model.init_continuous_batching(GREEDY, pages_config(4, 20))
        manager.start()
        manager.add_request(prompts_of(8)[0], max_new_tokens=100_000)
        wait_until(lambda: session.pages_in_use > 0)
    assert not manager.is_running()
    assert "init_continuous_batching" not in vars(model)
    assert model.config._attn_implementation == "sdpa"
    kwargs = {"attention_mask": torch.ones(1, 8), "max_new_tokens": 2}
    assert model.generate(torch.tensor(prompts_of(8)), GREEDY, **kwargs).shape == (1, 10)


def test_a_manager_may_last_as_long_as_the_context():
    model, prompts = FAMILIES["qwen2"].build(2), prompts_of(30)
    expected = alone(model, prompts[0], 12, "snapkv", **EVICTING)
    with paged.compress(model, "snapkv", **EVICTING):
        for _ in range(2):
            found = model.generate_batch(
                prompts, GREEDY, continuous_batching_config=pages_config(8, 9), persistent_manager=True
            )
            assert [answer.generated_tokens for answer in found.values()] == [expected]
    assert not hasattr(model, "_cached_continuous_batching_manager")


REFUSED = {
    "full": ("full", {"ratio": None}, "it compresses nothing"),
    "adaptive": ("adakv", {}, "head_budget='adaptive' does not go with continuous batching: all layers"),
    "layers": ("pyramidkv", {}, "layer_budget='pyramid' does not go with continuous batching: all layers"),
    "second reading": ("kvzip", EVEN, "reads the prompt twice"),
    "tokens": ("fastv", {}, "drops vision tokens, but requests are text"),
    "vision": ("snapkv", {"ratio_of": "vision"}, "requests are text"),
    "scope": ("snapkv", {"scope": "context"}, "where its question begins"),
    "moved": ("streamingllm", {"positions": "cache"}, "keys would have to be rotated again"),
    "fed again": ("snapkv", {"first_token": "compressed"}, "feeds no token twice"),
    "chunks": ("snapkv", {"prefill_chunk": 8}, "the scheduler chooses the chunks"),
    "storage": ("snapkv", {"cache_implementation": "offloaded"}, "pages are the storage"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_live_in_pages_is_refused_in_one_line(case):
    method, options, reason = REFUSED[case]
    with pytest.raises(KVCompressError, match=reason) as refusal:
        paged.compress(FAMILIES["qwen2"].build(2), method, **{"ratio": 0.5, **options})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "option",
    [
        {"use_async_batching": True},
        {"use_cuda_graph": True},
        {"use_cuda_graph": (False, True)},
        {"default_compile_level": 1},
        {"max_blocks_per_request": 8},
        {"cpu_offload_space": 1.0},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_the_manager_that_pages_cannot_follow_are_refused(option):
    model = FAMILIES["qwen2"].build(2)
    refused = pytest.raises(KVCompressError, match=f"do not go with {next(iter(option))}=")
    with paged.compress(model, "keydiff", budget=8, decode_budget=8), refused:
        model.init_continuous_batching(GREEDY, pages_config(4, 20, **option))


def test_a_request_without_a_bound_is_refused():
    model, endless = FAMILIES["qwen2"].build(2), GenerationConfig(do_sample=False)
    refused = pytest.raises(KVCompressError, match="nothing bounds the pages of a request")
    with paged.compress(model, "keydiff", ratio=0.5, decode_ratio=0.5), refused:
        model.init_continuous_batching(endless, pages_config(4, 20))


def test_a_request_that_only_a_hint_bounds_is_refused():
    """The hint is of the workload; `max_new_tokens` of a request bounds it."""
    model = FAMILIES["qwen2"].build(2)
    compressor = PagedCompressor(make_policy("keydiff", 0.5, decode_ratio=0.5), model.config, None)
    with pytest.raises(KVCompressError, match="give it max_new_tokens="):
        compressor.register(SimpleNamespace(initial_tokens=[5, 6], max_new_tokens=None))


@pytest.mark.parametrize("outer", [paged.compress, kvcompress.compress], ids=["paged", "alone"])
def test_one_context_at_a_time(outer):
    model = FAMILIES["qwen2"].build(2)
    inner = paged.compress(model, "knorm", budget=8)
    with outer(model, "keydiff", budget=8), pytest.raises(KVCompressError, match="already being compressed"):
        inner.__enter__()


def test_sliding_windows_alone_leave_nothing_to_compress():
    config = MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(KVCompressError, match="there is nothing to compress"):
        paged.compress(MistralForCausalLM(config), "keydiff", budget=8)


def test_the_example_of_the_page(capsys):
    example = {"model": FAMILIES["qwen2"].build(2), "prompts": prompts_of(40, 60, 12)}
    code = python_blocks(DOCS / "many-requests.md")[-1]
    exec(code.replace("num_blocks=64", "num_blocks=64, max_batch_tokens=64"), example)
    assert [len(answer.generated_tokens) for answer in example["answers"].values()] == [64] * 3
    assert "\n" in capsys.readouterr().out


def test_another_continuous_batching_is_refused(monkeypatch):
    from kvcompress.paged import pages

    monkeypatch.setitem(pages.CONTRACT, pages.FullAttentionCacheAllocator.get_seqlen_k, ("self", "request_id"))
    with pytest.raises(KVCompressError, match="get_seqlen_k has other parameters"):
        paged.compress(FAMILIES["qwen2"].build(2), "keydiff", budget=8)


def test_heads_that_keep_unequal_numbers_are_noticed(monkeypatch):
    model, keydiff = FAMILIES["qwen2"].build(2), kvcompress.list_methods()["keydiff"].cls

    def select(self, scores, view):
        kept = super(keydiff, self).select(scores, view)
        kept[:, 0, 0] = -1
        return kept

    monkeypatch.setattr(keydiff, "select", select)
    with paged.compress(model, "keydiff", budget=8):
        found = model.generate_batch(prompts_of(20), GREEDY, continuous_batching_config=pages_config(4, 20))
    assert "different numbers of entries" in next(iter(found.values())).error
