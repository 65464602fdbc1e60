"""Continuous batching on compressed pages: each request gets the tokens that it gets alone, in bounded memory."""

import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import ContinuousBatchingConfig, GenerationConfig, MistralConfig, MistralForCausalLM

import kvcompress
from kvcompress import paged
from kvcompress.errors import KVCompressError
from kvcompress.paged.session import check_policy
from kvcompress.policy.policy import Policy, make_policy
from kvcompress.scoring.merging import MERGES
from tests.support.docs import DOCS, python_blocks
from tests.support.examples import examples, some
from tests.support.families import FAMILIES, FIRST_TEXT, MORE_FAMILIES, VOCAB_SIZE
from tests.support.strategies import METHODS, OPTIONS

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

GREEDY = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=12)


def lives_in_pages(method: str) -> bool:
    try:
        check_policy(make_policy(method, 0.5))
    except KVCompressError:
        return False
    return True


LIVING = [method for method in METHODS if lives_in_pages(method)]


@pytest.fixture(autouse=True)
def quiet(caplog):
    """transformers warns of every generation without an end token."""
    for name in ("generation", "ContinuousBatchingLogger"):
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    caplog.set_level(logging.ERROR, "ContinuousBatchingLogger")


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
        return make_policy(self.method, **dict(self.arguments))

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
    if draw(st.integers(0, 3)) == 0:
        arguments["merge"] = draw(st.sampled_from(sorted(MERGES)))
    ids = st.integers(FIRST_TEXT, VOCAB_SIZE - 1)
    # Two keys are equally like their mean: rounding decides which one keydiff keeps.
    prompts = draw(st.lists(st.lists(ids, min_size=3, max_size=longest).map(tuple), min_size=2, max_size=requests))
    new = tuple(draw(st.integers(1, GREEDY.max_new_tokens)) for _ in prompts)
    page_size = draw(st.sampled_from([4, 8, 16]))
    policy = make_policy(method, **arguments)
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
    arguments = dict(case.arguments)
    expected = [
        alone(model, prompt, n, case.method, **arguments) for prompt, n in zip(case.prompts, case.new, strict=True)
    ]
    with paged.compress(model, case.method, **arguments) as session:
        assert answers(model, case.config, case.prompts, case.new) == expected
    assert session.pages_in_use == 0
    assert 0 < session.peak_pages <= case.pages


@given(case=cases(longest=30, requests=4))
@examples(5)
def test_a_request_gets_the_tokens_that_it_gets_alone(case):
    check(FAMILIES["qwen2"].build(2), case)


@pytest.mark.parametrize("method", some(LIVING, few=[]))
def test_every_method_that_lives_in_pages_gives_the_tokens_of_requests_alone(method):
    @given(case=cases([method]))
    @examples(4)
    def check_method(case):
        check(FAMILIES["llama"].build(), case)

    check_method()
