"""Compression on top of eager attention and of flash_attention_2: transformers' own flash path, over a stand-in for
the package on the CPU."""

import pytest
import torch
from transformers import AttentionInterface

import kvcompress
from kvcompress.check.reference import generate
from tests.support.answers import attending_by
from tests.support.calibrations import calibration_of
from tests.support.examples import paired, some
from tests.support.families import FAMILIES
from tests.support.strategies import METHODS, SOME_METHODS

NEW = 4
MODEL = FAMILIES["qwen2"].build()
EVERY = [*METHODS, "attention-matching"]


@pytest.fixture
def flash_model(fake_flash_attn):
    with attending_by(MODEL, "flash_attention_2"):
        yield MODEL


@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
@pytest.mark.parametrize(("method", "lengths"), some(paired(EVERY, [[40, 23], [40]]), [*SOME_METHODS, EVERY[-1]]))
def test_other_implementations_and_sdpa_agree(method, lengths, implementation, fake_flash_attn):
    inputs = FAMILIES["qwen2"].inputs(MODEL, lengths)
    with kvcompress.compress(MODEL, method, 0.3, **calibration_of(method, MODEL)):
        tokens, expected = generate(MODEL, inputs, NEW)
    with attending_by(MODEL, implementation), kvcompress.compress(MODEL, method, 0.3, **calibration_of(method, MODEL)):
        _, logits = generate(MODEL, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_second_prompt_on_flash_attention(flash_model):
    first, more = torch.arange(10, 40)[None], torch.arange(50, 60)[None]
    logits = {}
    for implementation in ("flash_attention_2", "sdpa"):
        flash_model.set_attn_implementation(implementation)
        cache = kvcompress.CompressedCache(flash_model.config, "snapkv", 0.3)
        with kvcompress.attach(flash_model):
            flash_model(first, past_key_values=cache)
            logits[implementation] = flash_model(more, past_key_values=cache).logits
    torch.testing.assert_close(logits["flash_attention_2"], logits["sdpa"], atol=1e-4, rtol=0)


def test_the_models_config_names_its_own_implementation_again_afterwards(flash_model):
    with kvcompress.compress(flash_model, "snapkv", 0.3):
        generate(flash_model, FAMILIES["qwen2"].inputs(flash_model, [20]), 2)
    assert flash_model.config._attn_implementation == "flash_attention_2"


def test_our_implementation_is_named_again_also_where_the_base_raises():
    """A flash base is called under its own name, which it reads from the config."""
    named = []

    def fails(module: torch.nn.Module, *args: object, **kwargs: object) -> None:
        named.append(module.config._attn_implementation)
        raise ZeroDivisionError

    AttentionInterface.register("flash_that_fails", fails)
    MODEL.config._attn_implementation = "flash_that_fails"
    try:
        with kvcompress.compress(MODEL, "snapkv", 0.3):
            with pytest.raises(ZeroDivisionError):
                MODEL(torch.arange(10, 40)[None])
            assert MODEL.config._attn_implementation == "kvcompress_flash_that_fails"
        assert MODEL.config._attn_implementation == "flash_that_fails"
    finally:
        MODEL.config._attn_implementation = "sdpa"
    assert named == ["flash_that_fails"]
