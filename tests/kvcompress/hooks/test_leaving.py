"""Whatever happens inside a context, and however often it is left, the model is then as it was."""

import copy
import gc
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch

import kvcompress
from kvcompress.cache.memory import Memory
from kvcompress.check.reference import generate
from kvcompress.hooks.replacement import Replacement, wrapped
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.hooks.threads import Threads
from tests.support.families import FAMILIES
from tests.support.learned_checkpoints import checkpoint_for
from tests.support.snapshot import snapshot

VLM = FAMILIES["llava-onevision"]
# Between them they put every hook on the model: rotary, hidden states, a second reading, an answer ahead, chunks,
# dropped tokens, the vision tower, a video's frames, a last token fed again.
CASES = {
    "attention": ("snapkv", {}),
    "sums": ("h2o", {"decode_budget": 8, "decode_interval": 1}),
    "rotary": ("expected-attention", {"decode_budget": 8, "decode_interval": 1}),
    "hidden states": ("fastkvzip", {}),
    "second reading": ("kvzip", {}),
    "answer ahead": ("hindsight", {"answer_tokens": 3}),
    "chunks": ("snapkv", {"prefill_chunk": 8}),
    "moved keys": ("snapkv", {"positions": "cache"}),
    "dropped tokens": ("fastv", {"layer": 1}),
    "vision tower": ("visionzip", {}),
    "frames": ("evs", {"ratio": 1.0}),  # of images it drops none
    "hidden tokens": ("dycoke", {"layer": 1, "ratio": 1.0}),
    "fed again": ("snapkv", {"first_token": "compressed"}),
}


class Interruption(BaseException):
    """As a keyboard's, which no handler of errors takes for one."""


def places(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Where the model's own work may be cut off."""
    decoder = model.model.language_model
    return {
        "vision tower": model.model.vision_tower,
        "first layer": decoder.layers[0],
        "last layer's output": decoder.layers[-1].self_attn.o_proj,
        "logits": model.lm_head,
    }


def session_of(model: torch.nn.Module, case: str) -> kvcompress.Session:
    method, options = CASES[case]
    options = {"ratio": 0.5, **options}
    if method == "fastkvzip":
        options["checkpoint"] = checkpoint_for(method, model)
    return kvcompress.compress(model, method, **options)


@pytest.fixture(scope="module")
def answered() -> tuple[torch.nn.Module, dict, torch.Tensor]:
    """The model, a prompt, and the logits that follow."""
    model, inputs = VLM.build(), VLM.inputs(VLM.build(), [40], [1])
    return model, inputs, generate(model, inputs, 2)[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("place", "passes"),
    [
        ("vision tower", 0),
        ("first layer", 0),
        ("last layer's output", 0),
        ("logits", 0),
        ("first layer", 1),
        ("logits", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else ("in the prompt", "after it")[value],
)
def test_an_exception_anywhere_in_a_forward_pass_leaves_the_model_as_it_was(answered, case, place, passes):
    model, inputs, expected = answered
    before = snapshot(model)
    shared, session, calls = SharedPrompt(model), session_of(model, case), iter(range(100))

    def interrupt(*args: object) -> None:
        if next(calls) >= passes:
            raise Interruption

    hook = places(model)[place].register_forward_pre_hook(interrupt)
    with pytest.raises(Interruption), hook, shared, session:
        generate(model, inputs, 2)
    assert snapshot(model) == before
    for context in (shared, session):
        context.__exit__(None, None, None)
    assert snapshot(model) == before
    assert torch.equal(generate(model, inputs, 2)[1], expected)
    with session_of(model, case):
        generate(model, inputs, 2)
    assert snapshot(model) == before


@pytest.mark.parametrize("case", CASES)
def test_a_context_that_is_left_twice_or_was_never_entered_does_nothing_then(case):
    model, inputs = VLM.build(), VLM.inputs(VLM.build(), [40], [1])
    generate(model, inputs, 2)
    before = snapshot(model)
    session = session_of(model, case)
    session.__exit__(None, None, None)
    assert snapshot(model) == before
    for _ in range(2):  # it may be entered again
        with session:
            generate(model, inputs, 2)
            session.__exit__(None, None, None)
            assert snapshot(model) == before
            assert not session.is_entered
        assert snapshot(model) == before
    with session, pytest.raises(kvcompress.KVCompressError, match="already being compressed"), session:
        pass
    assert snapshot(model) == before


def test_a_token_that_could_not_be_forgotten_leaves_a_cache_that_is_broken(answered, monkeypatch):
    model, inputs, _ = answered
    forget, calls = Memory.forget_last, iter(range(100))

    def interrupt(self: Memory) -> None:
        if next(calls) == 1:
            raise Interruption
        forget(self)

    monkeypatch.setattr(Memory, "forget_last", interrupt)
    with session_of(model, "fed again") as session:
        with pytest.raises(Interruption):
            generate(model, inputs, 2)
        assert session.cache.is_broken


@pytest.mark.parametrize("case", ["chunks", "second reading"])
def test_after_an_interruption_inside_the_context_another_thread_may_generate(answered, case):
    model, inputs, _ = answered

    def interrupt(*args: object) -> None:
        raise Interruption

    hook = places(model)["last layer's output"].register_forward_pre_hook(interrupt)
    with session_of(model, case) as session:
        with pytest.raises(Interruption), hook:
            model.generate(**inputs, max_new_tokens=2)
        assert not session._threads.has_this()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(model.generate, **inputs, max_new_tokens=2).result().shape[0] == 1


def test_no_thread_enters_while_another_is_asking():
    threads = Threads()

    class Inside(set):
        def add(self, thread: int) -> None:
            other = Thread(target=lambda: entered.append(enters(threads)))
            other.start()
            other.join(0.2)  # it waits for this one, or it is through
            super().add(thread)

    entered: list[bool] = []
    threads._inside = Inside()
    threads.enter(is_alone=True)
    deadline = time.monotonic() + 10
    while not entered and time.monotonic() < deadline:
        time.sleep(0.01)
    assert entered == [False]


def enters(threads: Threads) -> bool:
    threads._inside = set(threads._inside)
    try:
        threads.enter(is_alone=False)
    except kvcompress.KVCompressError:
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_the_entries_and_the_model_are_freed_with_their_last_name_and_wait_for_no_collection_of_garbage(case):
    model = copy.deepcopy(VLM.build())
    inputs = VLM.inputs(model, [40], [1])
    gc.collect()
    gc.disable()
    try:
        with session_of(model, case) as session:
            generate(model, inputs, 2)
        gone = [weakref.ref(each) for each in (session.cache, model)]
        del session, model
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_leaving_a_context_twice_leaves_the_next_one_connected():
    model, inputs = VLM.build(), VLM.inputs(VLM.build(), [40], [1])
    first = session_of(model, "attention")
    with first:
        pass
    with session_of(model, "attention") as second:
        first.__exit__(None, None, None)
        generate(model, inputs, 2)
        assert second.cache.realised_ratios()[0] == [0.5]


def test_a_model_is_not_copied_inside_a_context_which_its_copy_would_never_leave():
    model, inputs = VLM.build(), VLM.inputs(VLM.build(), [40], [1])
    with session_of(model, "attention") as session:
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(kvcompress.KVCompressError, match="cannot be copied or pickled"):
                copied(model)
        generate(model, inputs, 2)
        assert session.cache.realised_ratios()[0] == [0.5]
        copy.deepcopy(session.cache)
    copy.deepcopy(model)


def test_entering_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch):
    model = VLM.build()
    before = snapshot(model)
    session = session_of(model, "frames")
    monkeypatch.setattr(session._frames, "attach", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), session:
        pass
    assert snapshot(model) == before
    with session_of(model, "attention"):
        pass
    assert snapshot(model) == before


def test_what_stood_in_a_methods_place_comes_back_where_two_replace_it():
    model = VLM.build()
    before = snapshot(model)
    method = model.get_output_embeddings
    with Replacement(model, "get_output_embeddings", lambda: 1) as outer:
        inner = wrapped(model, "get_output_embeddings", lambda of_outer: of_outer() + 1)
        assert model.get_output_embeddings() == 2
        for _ in range(2):
            inner.remove()
            assert model.get_output_embeddings() == 1
        outer.remove()
        assert model.get_output_embeddings == method
    assert snapshot(model) == before
