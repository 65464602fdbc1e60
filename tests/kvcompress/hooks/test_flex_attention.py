"""Compression on top of flex_attention, which is not compiled here: compiling takes minutes on a CPU."""

import copy

import pytest
import torch
from torch.nn.attention import flex_attention
from transformers.integrations import flex_attention as theirs

import kvcompress
from tests.support.families import FAMILIES

MODEL = FAMILIES["qwen2"].build()
FLEX = copy.deepcopy(MODEL)
STATIC = {"cache_implementation": "static", "max_new_tokens": 16}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch) -> None:
    def attend(query, key, value, training, **kwargs):
        return flex_attention.flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", attend)
    FLEX.set_attn_implementation("flex_attention")


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "quantized"}, STATIC], ids=["ragged", "bits", "static"]
)
@pytest.mark.parametrize("lengths", [[40, 40], [40, 23]], ids=["even", "padded"])
@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_flex_attention_and_sdpa_agree_in_a_prompt_a_step_and_a_second_prompt(method, lengths, options):
    inputs, more = FAMILIES["qwen2"].inputs(MODEL, lengths), torch.arange(20, 30).view(2, 5)
    logits = []
    for model in (FLEX, MODEL):
        with torch.no_grad(), kvcompress.compress(model, method, 0.4, window_size=4, **options) as session:
            given = [model(**inputs).logits[:, -1:]]
            given += [model(ids, past_key_values=session.cache).logits for ids in (more[:, :1], more)]
        logits.append(torch.cat(given, dim=1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
