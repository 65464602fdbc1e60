"""The talker begins with the first text tokens: the same text and the same speech, sooner."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import kvcompress
from kvcompress import KVCompressError
from kvcompress.speech import answering, streaming
from kvcompress.speech.overlapped import Reply, generate_overlapped
from kvcompress.speech.streaming import Window, stream
from tests.support.omni import CODE_S, PARTS, UNHEARD, lengths

SEED = 5


class Noting(StoppingCriteria):
    """Each token that is there is noted in `tokens`; before that `do` is called with how many were there."""

    def __init__(self, do=lambda count: None):
        self.tokens, self.do = [], do

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self.do(len(self.tokens))
        self.tokens.append(int(input_ids[0, -1]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture
def given(omni, omni_inputs) -> dict[str, Any]:
    """What `generate` is given, of a prompt with a picture and sound."""
    return {**answering._for_thinker_only(omni_inputs), "thinker_do_sample": False, "talker_eos_token_id": [65, 67]}


@dataclass
class Spoken:
    """logits: of each of the talker's steps, (steps, codes)."""

    text: list[int]
    codes: list[int]
    logits: torch.Tensor
    waveform: torch.Tensor

    @property
    def tokens(self) -> tuple[list[int], list[int]]:
        return self.text, self.codes


@pytest.fixture
def answered(omni):
    """Calls `generate`, or ours."""
    model, _ = omni

    def call(generate, **given) -> Spoken:
        codes, logits = Noting(), []
        given = {"talker_stopping_criteria": StoppingCriteriaList([codes]), **given}
        torch.manual_seed(SEED)
        with model.talker.register_forward_hook(lambda module, args, output: logits.append(output.logits[:, -1])):
            sequences, waveform = generate(**given)
        return Spoken(sequences[0, given["input_ids"].shape[1] :].tolist(), codes.tokens, torch.cat(logits), waveform)

    return call


@pytest.fixture
def overlapped(omni) -> Callable[..., tuple[torch.LongTensor, torch.Tensor]]:
    return partial(generate_overlapped, omni[0])


@pytest.mark.parametrize(
    ("text", "codes", "samples"), [(2, 6, True), (3, 6, False), (12, 20, True), (12, 20, False), (12, 5, True)]
)
def test_text_codec_tokens_and_sound_are_those_of_generate(omni, overlapped, given, answered, text, codes, samples):
    """Speech goes on long after the text, and ends before it."""
    given |= {**lengths(text, codes), "talker_do_sample": samples}
    after, along = (answered(generate, **given) for generate in (omni[0].generate, overlapped))
    assert along.tokens == after.tokens
    assert torch.equal(along.logits, after.logits), "the talker read other states"
    assert torch.equal(along.waveform, after.waveform)
    assert [len(part) for part in after.tokens] == [text, codes]


def test_a_text_that_ends_by_itself_is_followed_by_the_same_speech(omni, overlapped, given, answered):
    given |= {**lengths(2, 20), "thinker_max_new_tokens": 12}
    text = answered(omni[0].generate, **given).text
    assert len(text) == 12
    given["thinker_eos_token_id"] = next(token for place, token in enumerate(text[4:], 4) if token not in text[:place])
    after, along = (answered(generate, **given) for generate in (omni[0].generate, overlapped))
    assert 4 < len(after.text) < 12
    assert along.tokens == after.tokens
    assert torch.equal(along.logits, after.logits)


def test_every_text_token_reaches_the_talker(overlapped, given, answered, monkeypatch):
    """Else the tests above would pass with any states."""
    given |= lengths(12, 10)
    right, take = answered(overlapped, **given), Reply._take

    def forget_the_fifth(self, embeddings, last):
        take(self, embeddings * (self._fed != 5), last * (self._fed != 5))

    monkeypatch.setattr(Reply, "_take", forget_the_fifth)
    wrong = answered(overlapped, **given)
    assert wrong.text == right.text
    assert torch.equal(wrong.logits[:4], right.logits[:4])
    assert (wrong.logits[4] - right.logits[4]).abs().max() > 1


def test_the_talker_begins_before_the_text_ends_and_waits_for_it(omni, overlapped, given, answered):
    """The thinker's tenth token waits for the talker's eighth, for ever if speech came after the text."""
    eighth, met = threading.Event(), []

    def wait(count: int) -> None:
        if count == 9:
            met.append(eighth.wait(timeout=60))

    given |= lengths(12, 30)
    meeting = {
        "thinker_stopping_criteria": StoppingCriteriaList([Noting(wait)]),
        "talker_stopping_criteria": StoppingCriteriaList([Noting(lambda count: eighth.set() if count == 7 else None)]),
    }
    along = answered(overlapped, **given, **meeting)
    assert met == [True]
    after = answered(omni[0].generate, **given)
    assert along.text == after.text
    assert torch.equal(along.logits, after.logits)


def test_both_caches_are_compressed_as_without_overlap(omni, overlapped, given, answered):
    model, _ = omni
    given |= lengths(8, 20)
    plain = answered(model.generate, **given)
    method = {"method": "snapkv", "ratio": 0.3, "window_size": 4}
    with kvcompress.compress(model, **method) as thinker, kvcompress.compress(model.talker, **method) as talker:
        after, caches = answered(model.generate, **given), (thinker.cache, talker.cache)
        along = answered(overlapped, **given)
    assert along.tokens == after.tokens
    assert torch.equal(along.logits, after.logits)
    assert not torch.equal(along.logits, plain.logits)
    for session, cache in zip((thinker, talker), caches, strict=True):
        assert session.cache is not cache
        assert session.cache.nbytes == cache.nbytes
        assert session.cache.realised_ratios()[0][0] == pytest.approx(0.3, abs=0.01)


def test_a_stream_may_overlap(omni, omni_inputs):
    model, _ = omni
    given = {"text_tokens": 12, "codec_tokens": 24, "exact": True, "seed": SEED, "window": Window(2, 1, 1)}
    after, along = (answering.answer(model, omni_inputs, **given, overlap=overlap) for overlap in (False, True))
    assert torch.equal(along.text, after.text)
    assert torch.equal(along.waveform, after.waveform)
    assert along.audio_s == pytest.approx((24 - UNHEARD) * CODE_S)
    assert after.first_code_s > after.text_s


def test_thinker_and_talker_wait_while_the_first_sound_is_made(omni, omni_inputs, monkeypatch):
    model, _ = omni
    thinker, talker = Noting(), Noting()
    written, make = [], streaming.SoundStream._make_mel

    def slowly(self, *given):
        before = len(thinker.tokens), len(talker.tokens)
        time.sleep(0.1)
        written.append((len(thinker.tokens) - before[0], len(talker.tokens) - before[1]))
        make(self, *given)

    monkeypatch.setattr(streaming.SoundStream, "_make_mel", slowly)
    noting = {
        f"{part}_stopping_criteria": StoppingCriteriaList([note])
        for part, note in zip(PARTS, (thinker, talker), strict=True)
    }
    inputs = answering._for_thinker_only(omni_inputs)
    for _ in stream(model, "Chelsie", Window(4, 0, 0), overlap=True, **inputs, **noting, **lengths(150, 40)):
        pass
    assert max(written[0]) <= 1, "a token that was under way may come"
    assert max(map(max, written[1:])) > 1, "afterwards they do not wait"


def test_states_of_a_token_go_when_the_talker_has_them(omni, given, monkeypatch):
    """Only those of the prompt and of the first token stay; `generate` holds those of all layers and tokens."""
    model, _ = omni
    results, thinker_generate = [], model.thinker.generate
    monkeypatch.setattr(
        model.thinker, "generate", lambda **kwargs: results.append(thinker_generate(**kwargs)) or results[0]
    )
    generate_overlapped(model, **given, **lengths(6, 8))
    assert results[0].hidden_states == (None,) * 6


# What fails


@pytest.fixture(autouse=True)
def the_model_is_left_as_it_was(omni) -> Iterator[None]:
    model, _ = omni
    before, threads = [dict(vars(part)) for part in (model.thinker, model.talker)], threading.active_count()
    hooks = len(model.talker._forward_pre_hooks)
    yield
    assert threading.active_count() == threads
    assert len(model.talker._forward_pre_hooks) == hooks
    for part, earlier in zip((model.thinker, model.talker), before, strict=True):
        assert vars(part).keys() == earlier.keys()


def test_what_fails_in_either_is_raised_and_ends_the_other(omni, given):
    model, _ = omni

    def fail(count: int) -> None:
        if count == 3:
            raise RuntimeError("broken")

    for part in PARTS:
        criteria = {f"{part}_stopping_criteria": StoppingCriteriaList([Noting(fail)])}
        with pytest.raises(RuntimeError, match="broken"):
            generate_overlapped(model, **given, **criteria, **lengths(100_000, 100_000))


def test_a_stream_that_is_closed_ends_the_thinker(omni, omni_inputs):
    model, _ = omni
    inputs = answering._for_thinker_only(omni_inputs)
    source = stream(model, "Chelsie", Window(2, 0, 0), overlap=True, **inputs, **lengths(100_000, 100_000))
    assert len(next(source)) > 0
    source.close()


@pytest.mark.parametrize(
    ("more", "rows", "message"),
    [
        ({"thinker_no_such_setting": 1}, 1, "no_such_setting"),
        ({"thinker_max_new_tokens": 1}, 1, "the text has 1 token: speech needs at least 2"),
        ({}, 2, "2 prompts: speech can overlap text for one prompt at a time"),
    ],
)
def test_what_cannot_be_spoken_is_refused(omni, given, more, rows, message):
    given["input_ids"] = given["input_ids"].repeat(rows, 1)
    with pytest.raises(ValueError, match=message):
        generate_overlapped(omni[0], **given, **more)


def test_a_thinker_that_reads_its_last_token_is_found_out(omni, given, monkeypatch):
    """As transformers lets it on mps, where it looks late whether a text ends."""
    take = Reply._take

    def takes_twice(self, embeddings, last):
        take(self, embeddings, last)
        if self._fed == 5:
            take(self, embeddings, last)

    monkeypatch.setattr(Reply, "_take", takes_twice)
    with pytest.raises(KVCompressError, match="transformers fed 6 of 6 text tokens"):
        generate_overlapped(omni[0], **given, **lengths(6, 20))
