"""Long speech on bounded memory: thinker and talker evict while they write."""

import gc
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList

import kvcompress
from kvcompress import CompressedCache
from kvcompress.cache_name import CACHE, cache_in
from kvcompress.speech import answering
from kvcompress.speech.overlapped import EachToken, generate_overlapped
from kvcompress.speech.prompts import growing_wav
from kvcompress.speech.streaming import Window, stream
from tests.support.omni import CODE_S, PARTS, UNHEARD, to_generate

BUDGET = 40


def asked(inputs: dict[str, torch.Tensor], text: int, codes: int) -> dict[str, Any]:
    """What `generate` is given for an answer of these lengths, greedy throughout."""
    return {**to_generate(inputs, text, codes), **{f"{part}_do_sample": False for part in PARTS}}


@contextmanager
def watched(part: PreTrainedModel, before: Callable[[dict], dict]) -> Iterator[list[torch.Tensor]]:
    """Inside, `before` may change what each forward pass of a part is given; collects the logits of its last token."""
    logits: list[torch.Tensor] = []
    changing = part.register_forward_pre_hook(lambda module, args, kwargs: (args, before(kwargs)), with_kwargs=True)
    with changing, part.register_forward_hook(lambda module, args, output: logits.append(output.logits[0, -1])):
        yield logits


@pytest.mark.parametrize("name", PARTS)
def test_evicting_while_writing_is_hiding_what_is_evicted(omni, omni_inputs, name):
    """On the full cache, with the mask of what is still held: so every position is right."""
    model, _ = omni
    part, given, held = getattr(model, name), asked(omni_inputs, 12, 16), []
    config = part.config
    cache = CompressedCache(config, "streamingllm", 0.5, decode_budget=BUDGET, decode_interval=1)

    def note(kwargs: dict) -> dict:
        held.append(None if cache.is_empty else cache.kept_indices(0)[0][0])
        return kwargs

    with kvcompress.attach(part), watched(part, note) as evicting:
        model.generate(**given, **{f"{name}_{CACHE}": cache})
    steps = iter(held)

    def hide(kwargs: dict) -> dict:
        kept = next(steps)
        if kept is None:
            return kwargs
        seen = cache_in(kwargs).get_seq_length()
        mask = torch.zeros(1, seen + 1, dtype=torch.long)
        mask[0, kept] = mask[0, -1] = 1
        if kwargs.get("attention_mask") is None and kwargs.get("position_ids") is None:
            # `generate` dropped a mask of ones, and the talker, which has none, counts its tokens.
            kwargs = {**kwargs, "position_ids": torch.full((3, 1, 1), seen)}
        return {**kwargs, "attention_mask": mask}

    with watched(part, hide) as hiding:
        model.generate(**given)
    assert len(evicting) == len(hiding) == {"thinker": 12, "talker": 16}[name]
    assert len(held[1]) > 2 * BUDGET, "the prompt keeps more than the answer may"
    assert [len(kept) for kept in held[2:]] == [BUDGET] * (len(held) - 2)
    torch.testing.assert_close(torch.stack(evicting), torch.stack(hiding), atol=1e-4, rtol=0)
    with watched(part, lambda kwargs: kwargs) as full:
        model.generate(**given)
    assert (torch.stack(full) - torch.stack(hiding)).abs().max() > 1e-2, "what was evicted makes a difference"


def caches(model: Any, **options: Any) -> dict[str, CompressedCache]:
    """Of thinker and talker, which keep a fifth of their prompts."""
    return {
        part: CompressedCache(getattr(model, part).config, "snapkv", 0.2, window_size=4, **options) for part in PARTS
    }


def sampling(held: dict[str, CompressedCache]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Arguments of `generate` with these caches; and the bytes that each has after each token."""
    sizes: dict[str, list[int]] = {part: [] for part in held}
    given: dict[str, Any] = {}
    for part, cache in held.items():
        note = EachToken(Event(), lambda ids, part=part, cache=cache: sizes[part].append(cache.nbytes))
        given |= {f"{part}_{CACHE}": cache, f"{part}_stopping_criteria": StoppingCriteriaList([note])}
    return given, sizes


@pytest.mark.parametrize("overlap", [False, True])
def test_kv_bytes_stay_level_while_both_write(omni, hello, overlap):
    model, _ = omni

    def run(**options: Any) -> dict[str, list[int]]:
        given, sizes = sampling(caches(model, **options))
        with kvcompress.attach(model.thinker), kvcompress.attach(model.talker):
            if overlap:
                generate_overlapped(model, **asked(hello, 45, 90), **given)
            else:
                model.generate(**asked(hello, 45, 90), **given)
        return sizes

    for part, sizes in run(decode_budget=BUDGET).items():
        third = len(sizes) // 3
        assert max(sizes[-third:]) <= max(sizes[third : 2 * third]), part
    for part, sizes in run().items():
        assert sizes[-1] > 1.3 * sizes[0], part


def live_tensor_bytes() -> int:
    gc.collect()
    return sum({t.data_ptr(): t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor}.values())


@pytest.mark.slow
def test_a_minute_of_speech_holds_no_more_than_ten_seconds(omni, hello, tmp_path: Path):
    """Codec tokens, as ids, are all that `generate` adds to: 8 bytes each, 50 of them a second, with their mask."""
    model, _ = omni
    given, sizes = sampling(caches(model, decode_budget=BUDGET))
    tensors, heard = {}, 0
    with kvcompress.attach(model.thinker), kvcompress.attach(model.talker), growing_wav(tmp_path / "a.wav") as write:
        asking = asked(hello, 600, 3000 + UNHEARD)
        for block in stream(model, "Chelsie", Window(16, 2, 1), overlap=True, **asking, **given):
            write(block)
            heard += len(block)
            second = heard // answering.SAMPLING_RATE
            if second % 10 == 0 and second not in tensors:
                tensors[second] = live_tensor_bytes()
    with wave.open(str(tmp_path / "a.wav")) as sound:
        assert sound.getnframes() / sound.getframerate() == pytest.approx(3000 * CODE_S) == 60
    assert {part: len(taken) for part, taken in sizes.items()} == {"thinker": 600, "talker": 3000 + UNHEARD}
    for part, taken in sizes.items():
        print(part, [taken[place] for place in range(0, len(taken), len(taken) // 6)])
        later = [max(taken[place : place + 100]) for place in range(100, len(taken) - 99, 100)]
        assert len(set(later)) == 1, part
    print("live tensors", tensors)
    minute, ten = max(tensors.values()), min(tensors[place] for place in tensors if place <= 20)
    assert minute - ten < 0.5e6 < 40 * 4 * answering.SAMPLING_RATE
