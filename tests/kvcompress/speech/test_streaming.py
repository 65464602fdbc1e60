"""Sound made while the talker writes: the same samples, sooner, on bounded memory."""

import inspect
import threading
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from kvcompress import KVCompressError
from kvcompress.speech import answering, streaming
from kvcompress.speech.prompts import SpeechPrompt, model_inputs
from kvcompress.speech.streaming import STEPS, BlockNoise, GivenNoise, SoundStream, Window, stream, vocoder_reach
from tests.support.omni import CODE_S, MEL, UNHEARD, randomize_sound, tiny_config

SEED = 5
EXACT = "exact"


@pytest.fixture(scope="module")
def token2wav() -> Qwen2_5OmniToken2WavModel:
    model = Qwen2_5OmniToken2WavModel(tiny_config().token2wav_config).eval()
    randomize_sound(model)
    return model


@pytest.fixture(scope="module")
def voice() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 8, generator=generator), torch.randn(1, 20, MEL, generator=generator)


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    """More than an exact window sees; the last block is half full."""
    return torch.randint(0, 60, (1, 61), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def whole(token2wav, voice, codes) -> torch.Tensor:
    """transformers' own waveform of the noise that streams begin with."""
    with torch.no_grad(), GivenNoise(noise_of(token2wav, codes.shape[1])):
        return token2wav(codes, *voice, num_steps=streaming.STEPS)


def noise_of(token2wav, codes: int) -> torch.Tensor:
    config = token2wav.config.dit_config
    frames = codes * config.repeats
    return BlockNoise(token2wav, SEED).draw(-(-frames // config.block_size))[:, :frames]


def heard(sound: SoundStream, codes: torch.Tensor, at_a_time: int = 7) -> list[torch.Tensor]:
    blocks = []
    for start in range(0, codes.shape[1], at_a_time):
        blocks += sound.feed(codes[0, start : start + at_a_time].tolist())
    return [*blocks, *sound.feed([], is_end=True)]


# The samples


def test_the_steps_are_those_of_a_whole_waveform_and_an_exact_window_sees_all_that_they_reach(token2wav, monkeypatch):
    monkeypatch.setattr(streaming, "STEPS", STEPS)
    assert inspect.signature(token2wav.code2wav_dit_model.sample).parameters["num_steps"].default == STEPS
    assert Window.exact(token2wav, 8) == Window(8, 36, 36)


@pytest.mark.parametrize(("window", "tolerance"), [(EXACT, 1e-4), (Window(8, 4, 2), 1e-4), (Window(8, 2, 1), 1e-3)])
def test_a_stream_has_the_samples_of_the_whole_waveform(token2wav, voice, codes, whole, window, tolerance):
    """Tolerances are parts of the loudest sample. Every sample is compared, those at seams with the others."""
    if window == EXACT:
        window = Window.exact(token2wav, 8)
    blocks = heard(SoundStream(token2wav, *voice, window, SEED), codes)
    assert len(blocks) > 1
    sound = torch.cat(blocks)
    assert sound.shape == whole.shape
    assert (sound - whole).abs().max() <= tolerance * whole.abs().max()


def test_a_window_that_sees_no_neighbours_has_other_samples(token2wav, voice, codes, whole):
    """So the tolerances above mean something."""
    sound = torch.cat(heard(SoundStream(token2wav, *voice, Window(8, 0, 0), SEED), codes))
    assert (sound - whole).abs().max() > 1e-2 * whole.abs().max()


def test_the_vocoder_needs_as_many_frames_as_it_reaches(token2wav, voice, codes, whole, monkeypatch):
    monkeypatch.setattr(streaming, "vocoder_reach", lambda config: vocoder_reach(config) // 4)
    sound = torch.cat(heard(SoundStream(token2wav, *voice, Window(8, 4, 2), SEED), codes))
    assert (sound - whole).abs().max() > 5e-4 * whole.abs().max()


def test_what_waits_does_not_grow(token2wav, voice, monkeypatch):
    seen, sample = [], token2wav.code2wav_dit_model.sample
    monkeypatch.setattr(
        token2wav.code2wav_dit_model,
        "sample",
        lambda *given, **rest: seen.append(given[2].shape[1]) or sample(*given, **rest),
    )
    sound, held, samples = SoundStream(token2wav, *voice, Window(8, 2, 1), SEED), [], 0
    for _ in range(4):
        most = 0
        for _ in range(4):
            samples += sum(len(block) for block in sound.feed([1] * 16))
            most = max(most, sound.held)
        held.append(most)
    assert held[1] == held[2] == held[3]
    assert max(seen) == (2 + 8 + 1) * 2  # codec tokens; a block has two
    samples += sum(len(block) for block in sound.feed([], is_end=True))
    assert samples == 256 * CODE_S * answering.SAMPLING_RATE


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_short_speech_is_whole(token2wav, voice, count):
    blocks = list(SoundStream(token2wav, *voice, Window(2, 1, 1)).feed([1] * count, is_end=True))
    assert sum(map(len, blocks)) == count * CODE_S * answering.SAMPLING_RATE


@pytest.mark.parametrize("given", [(0, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_a_window_that_cannot_be_is_refused(given):
    with pytest.raises(KVCompressError, match="chunk must be at least 1, behind and ahead at least 0"):
        Window(*given)


# The model


def test_a_streamed_answer_is_the_answer(omni, hello):
    model, _ = omni
    given = {"text_tokens": 4, "codec_tokens": 40, "exact": True, "seed": SEED}
    with GivenNoise(noise_of(model.token2wav, 40 - UNHEARD)):
        whole = answering.answer(model, hello, **given)
    blocks = []
    streamed = answering.answer(model, hello, **given, window=Window(2, 4, 4), hear=blocks.append)
    assert torch.equal(streamed.text, whole.text)
    assert streamed.waveform is None, "what was heard is not held"
    assert streamed.audio_s == whole.audio_s
    assert len(blocks) > 5
    torch.testing.assert_close(torch.cat(blocks), whole.waveform, atol=1e-4 * float(whole.waveform.abs().max()), rtol=0)
    assert whole.underruns is None
    assert streamed.underruns >= 0
    times = [streamed.text_s, streamed.first_code_s, streamed.first_audio_s, streamed.waveform_s, streamed.total_s]
    assert times == sorted(times)
    assert streamed.codes == 40


def test_the_first_block_is_there_while_the_talker_writes_and_closing_ends_the_answer(omni, hello):
    model, _ = omni
    before, threads = vars(model.token2wav)["forward"], threading.active_count()
    lengths = {"thinker_max_new_tokens": 4, "talker_max_new_tokens": 100_000}
    source = stream(model, "Chelsie", Window(2, 0, 0), **hello, **lengths)
    assert len(next(source)) > 0
    source.close()
    assert threading.active_count() == threads
    assert vars(model.token2wav)["forward"] is before


def test_an_unknown_speaker_is_one_line(omni, hello):
    with pytest.raises(KVCompressError, match="there is no speaker 'Nobody'"):
        next(stream(omni[0], "Nobody", **hello))


def test_what_fails_in_an_answer_is_raised(omni, hello):
    with pytest.raises(ValueError, match="no_such_setting"):
        next(stream(omni[0], "Chelsie", **hello, thinker_no_such_setting=1))


@pytest.mark.parametrize(
    ("blocks", "late"),
    [
        ([(1.0, 0.5)], 0),
        ([(1.0, 0.5), (1.4, 0.5), (1.9, 0.5)], 0),
        ([(1.0, 0.5), (1.6, 0.5), (2.0, 0.5)], 1),  # who listens hears the second from 1.6 to 2.1
        ([(1.0, 0.5), (1.6, 0.5), (2.2, 0.5)], 2),
    ],
)
def test_underruns_are_blocks_that_keep_one_waiting(blocks, late):
    assert answering.underruns(blocks) == late


@pytest.mark.slow
def test_ten_seconds_begin_long_before_they_are_whole(omni_checkpoint: str, tmp_path: Path):
    model, processor = answering.load(omni_checkpoint, "float32", torch.device("cpu"))
    assert isinstance(model, Qwen2_5OmniForConditionalGeneration)
    inputs = model_inputs(processor, SpeechPrompt("Hello, who are you?"), model.device)
    codes = 500 + UNHEARD
    answering.answer(model, inputs, 20, 20, exact=True)  # warm
    whole = answering.answer(model, inputs, 20, codes, exact=True)
    streamed = answering.answer(model, inputs, 20, codes, exact=True, window=Window(16, 4, 2))
    assert whole.audio_s == streamed.audio_s == 10
    assert streamed.first_audio_s <= 0.4 * whole.waveform_s
