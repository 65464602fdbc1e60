"""Speech: Qwen2.5-Omni with tiny random parts answers aloud under compression."""

import numpy as np
import pytest
import torch

import kvcompress
from kvcompress import CompressedCache, KVCompressError, measure
from kvcompress.speech import answering
from kvcompress.speech.prompts import SpeechPrompt, model_inputs
from kvcompress.tokens.base import TokenMethod
from tests.support.calibrations import calibration_of
from tests.support.clock import synchronised_reads
from tests.support.examples import some
from tests.support.omni import CODE_S, UNHEARD
from tests.support.strategies import LEARNED, SOME_METHODS

CPU = torch.device("cpu")


def answered(omni, inputs, **given) -> answering.Answer:
    return answering.answer(omni[0], inputs, text_tokens=4, codec_tokens=5, exact=True, **given)


def compressed(
    omni, inputs, method: str, ratio: float | None = None, **options
) -> tuple[answering.Answer, CompressedCache]:
    thinker = omni[0].thinker
    cache = CompressedCache(thinker.config, method, ratio, max_new_tokens=5, **options)
    with kvcompress.attach(thinker):
        return answered(omni, inputs, cache=cache), cache


# Answers


def test_full_says_exactly_what_the_plain_model_says(omni, omni_inputs):
    model, _ = omni
    torch.manual_seed(0)
    pixels = {("thinker_" if name == "pixel_values" else "") + name: value for name, value in omni_inputs.items()}
    text, waveform = model.generate(
        **pixels,
        thinker_max_new_tokens=4,
        thinker_min_new_tokens=4,
        thinker_do_sample=False,
        talker_max_new_tokens=5,
        talker_min_new_tokens=5,
        talker_eos_token_id=[65, 67],
    )
    answer, _ = compressed(omni, omni_inputs, "full")
    assert torch.equal(answer.text, text[0, omni_inputs["input_ids"].shape[1] :])
    assert torch.equal(answer.waveform, waveform)
    assert torch.equal(answered(omni, omni_inputs).waveform, waveform)


KV_METHODS = [
    name
    for name, info in kvcompress.list_methods().items()
    if info.cls.__module__.startswith("kvcompress.")
    and not issubclass(info.cls, TokenMethod)
    and name not in ("full", *LEARNED)
]


@pytest.mark.parametrize("method", some(KV_METHODS, SOME_METHODS))
def test_every_kv_method_compresses_the_thinker_and_is_heard(omni, omni_inputs, method):
    given = calibration_of(method, omni[0].thinker)
    answer, cache = compressed(omni, omni_inputs, method, 0.3, **given)
    kept = np.mean(cache.realised_ratios())
    assert kept == pytest.approx(0.3, abs=0.01)
    assert len(answer.text) == 4
    assert answer.audio_s == pytest.approx((5 - UNHEARD) * CODE_S)
    assert answer.waveform.isfinite().all()


def test_compress_on_the_whole_model_compresses_its_thinker(omni, omni_inputs):
    model, _ = omni
    with kvcompress.compress(model, "random", ratio=0.1, window_size=1) as session:
        changed = answered(omni, omni_inputs)
    assert np.mean(session.cache.realised_ratios()) == pytest.approx(0.1, abs=0.01)
    plain = answered(omni, omni_inputs)
    assert not torch.equal(changed.waveform, plain.waveform)
    assert torch.equal(plain.waveform, answered(omni, omni_inputs).waveform)


def test_the_talkers_cache_can_be_compressed(omni, omni_inputs):
    model, _ = omni
    cache = CompressedCache(model.talker.config, "snapkv", 0.2, window_size=4)
    with kvcompress.attach(model.talker):
        answer = answered(omni, omni_inputs, talker_cache=cache)
    assert np.mean(cache.realised_ratios()) == pytest.approx(0.2, abs=0.01)
    assert torch.equal(answer.text, answered(omni, omni_inputs).text)
    assert len(answer.waveform) == (5 - UNHEARD) * 480


def test_times_follow_the_order_of_the_work(omni, omni_inputs):
    answer = answered(omni, omni_inputs)
    order = [answer.first_text_s, answer.text_s, answer.first_code_s, answer.codes_s, answer.first_audio_s]
    assert order[0] > 0
    assert order == sorted(set(order))
    assert answer.first_audio_s == answer.waveform_s <= answer.total_s  # the waveform comes in one piece
    assert answer.codes == 5
    assert answer.real_time_factor == pytest.approx(answer.total_s / ((5 - UNHEARD) * CODE_S))


def test_every_time_is_taken_when_the_device_is_done(omni, omni_inputs):
    with synchronised_reads(measure) as reads:
        answered(omni, omni_inputs)
    assert {read.rpartition(":")[0] for read in reads} == {measure.__name__, answering.__name__}


def test_an_answer_of_one_token_cannot_be_spoken(omni, omni_inputs):
    with pytest.raises(KVCompressError, match="text_tokens=1"):
        answering.answer(omni[0], omni_inputs, text_tokens=1, codec_tokens=5)


# Parts


def test_parts_left_out_take_no_memory_and_the_rest_answers_the_same(omni_checkpoint, omni):
    model, processor = omni
    whole = answering.weight_bytes(model)
    assert all(whole.values())
    assert sum(whole.values()) == sum(4 * weight.numel() for weight in model.parameters())
    small, _ = answering.load(omni_checkpoint, "float32", CPU, ["vision", "audio", "speech"])
    left = answering.weight_bytes(small)
    assert left == {**dict.fromkeys(whole, 0), "language model": whole["language model"]}
    assert not hasattr(small, "talker")
    prompt = model_inputs(processor, SpeechPrompt("Hello there"), CPU)
    answer = answering.answer(small, prompt, text_tokens=4, codec_tokens=5, exact=True)
    assert answer.waveform is answer.real_time_factor is answer.first_audio_s is None
    assert torch.equal(answer.text, answered(omni, prompt).text)


def test_an_unknown_part_is_refused(omni_checkpoint):
    with pytest.raises(KVCompressError, match="no part 'ears'"):
        answering.load(omni_checkpoint, "float32", CPU, ["ears"])


def test_loading_without_a_tower_says_nothing_of_its_weights(omni_checkpoint, capfd):
    answering.load(omni_checkpoint, "float32", CPU, ["vision", "audio", "speech"])
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
