"""Sampling, beams, several answers per prompt: like the unhooked model at ratio 1.0, and right in batches."""

import pytest
import torch

import kvcompress
from kvcompress.cache_name import cache_in
from kvcompress.measure import Measurement, generate
from tests.support.calibrations import calibration_of
from tests.support.examples import paired, some
from tests.support.families import FAMILIES
from tests.support.strategies import METHODS, SOME_METHODS

MODEL = FAMILIES["qwen2"].build()
INPUTS = FAMILIES["qwen2"].inputs(MODEL, [40, 23])
NEW = 6
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "several answers": {"num_return_sequences": 3, "do_sample": True},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
}


def answer(inputs: dict, mode: str) -> torch.Tensor:
    torch.manual_seed(0)
    return MODEL.generate(**inputs, **MODES[mode], max_new_tokens=NEW)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
def test_ratio_one_gives_the_answers_of_the_unhooked_model(mode, cache_implementation):
    expected = answer(INPUTS, mode)
    with kvcompress.compress(MODEL, "snapkv", 1.0, max_new_tokens=NEW, cache_implementation=cache_implementation):
        assert torch.equal(answer(INPUTS, mode), expected)


EVICTING = [{}, {"decode_budget": 8, "decode_interval": 2}, {"decode_ratio": 0.25, "decode_interval": 1}]


BEAMS = paired(METHODS, ["beams", "several beams"], EVICTING)


@pytest.mark.parametrize(("method", "mode", "options"), some(BEAMS, SOME_METHODS))
def test_a_row_has_the_same_beams_alone_as_in_a_batch(method, mode, options):
    with kvcompress.compress(MODEL, method, 0.4, **options, **calibration_of(method, MODEL)):
        together = answer(INPUTS, mode)
        each = len(together) // 2
        for row in range(2):
            alone = answer(FAMILIES["qwen2"].solo(INPUTS, row), mode)
            assert torch.equal(together[row * each : (row + 1) * each, 40:], alone[:, -NEW:])


def test_equal_beams_of_one_prompt_share_what_was_kept():
    with kvcompress.compress(MODEL, "snapkv", 0.4) as session:
        answer(INPUTS, "several answers")
    kept = session.cache.kept_indices(0)
    assert len(kept) == 6
    prompt = [[head[head < 40].tolist() for head in row] for row in kept]
    assert prompt[0] == prompt[1] == prompt[2]
    assert prompt[3] == prompt[4] == prompt[5]
    assert prompt[0] != prompt[3]


def test_a_sessions_cache_is_the_answers_and_not_its_guides():
    def measured(**options) -> Measurement:
        return generate(MODEL, session, INPUTS, max_new_tokens=NEW, do_sample=False, **options)[1]

    with kvcompress.compress(MODEL, "snapkv", 0.4) as session:
        alone, guided = measured(), measured(guidance_scale=1.5)  # the guide has no prompt
        assert session.cache.seen_tokens == 40 + NEW - 1
        assert guided.realised_ratios == alone.realised_ratios
        assert (guided.kv_bytes_prompt, guided.kv_bytes_end) == (alone.kv_bytes_prompt, alone.kv_bytes_end)
        assert cache_in(MODEL(**INPUTS)) is session.cache


@pytest.mark.parametrize("assistant", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": MODEL}])
def test_assisted_decoding_is_a_clear_error(assistant):
    inputs = {
        "input_ids": torch.arange(10, 20).repeat(4)[None]
    }  # repeats itself, so that there is something to look up
    with (
        kvcompress.compress(MODEL, "snapkv", 0.4),
        pytest.raises(ValueError, match=r"(?i)assisted decoding"),  # transformers' own since 5.24
    ):
        MODEL.generate(**inputs, **assistant, max_new_tokens=NEW, do_sample=False)


def test_tokens_are_not_taken_back_out_of_a_compressed_cache():
    """As transformers before 5.24 does for the tokens of an assistant."""
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.4)
    for take_back in (lambda: cache.crop(1), cache.activate_past_recording):
        with pytest.raises(kvcompress.KVCompressError, match="cannot be taken back out"):
            take_back()
