"""The CPU stand-in for flash-attn computes the same as sdpa, in every family."""

import copy
import importlib.util
import sys

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

from tests.support.families import FAMILIES
from tests.support.flash_attn_stand_in import flash_attn_stand_in


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("lengths", [[40, 40], [26, 40]], ids=["no padding", "padding"])
def test_flash_attention_2_equals_sdpa(family, lengths, fake_flash_attn):
    inputs = family.inputs(family.build(), lengths, [1, 1] if family.is_vlm else None)
    logits = {}
    for implementation in ("sdpa", "flash_attention_2"):
        model = copy.deepcopy(family.build())
        model.set_attn_implementation(implementation)
        output = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        logits[implementation] = torch.stack(output.logits)
    assert "fake_flash_attn" in sys.modules["flash_attn"].__file__
    torch.testing.assert_close(logits["flash_attention_2"], logits["sdpa"], atol=1e-4, rtol=0)


def test_causal_mask_is_aligned_to_the_last_key(fake_flash_attn):
    from flash_attn import flash_attn_func

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 4, 16, generator=generator)
    k, v = (torch.randn(1, 5, 2, 16, generator=generator) for _ in range(2))
    visible = torch.ones(3, 5, dtype=torch.bool).tril(2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible, enable_gqa=True
    )
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), expected.transpose(1, 2))


def test_a_query_before_the_first_key_gets_zeros(fake_flash_attn):
    from flash_attn import flash_attn_func

    output = flash_attn_func(torch.ones(1, 3, 2, 8), *(torch.ones(1, 2, 2, 8) for _ in range(2)), causal=True)
    assert torch.equal(output[0, 0], torch.zeros(2, 8))
    assert torch.equal(output[0, 1:], torch.ones(2, 2, 8))


def test_unsupported_options_are_refused(fake_flash_attn):
    from flash_attn import flash_attn_func

    with pytest.raises(NotImplementedError, match="softcap"):
        flash_attn_func(*(torch.ones(1, 2, 2, 8) for _ in range(3)), softcap=1.0)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the real flash-attn is installed")
def test_nothing_is_left_behind():
    inside, outside = (copy.deepcopy(FAMILIES["qwen2"].build()) for _ in range(2))
    with flash_attn_stand_in():
        inside.set_attn_implementation("flash_attention_2")
    assert "flash_attn" not in sys.modules
    assert flash_utils._loaded_implementation is None
    assert not any("fake_flash_attn" in entry for entry in sys.path)
    with pytest.raises(ImportError, match="FlashAttention2"):
        outside.set_attn_implementation("flash_attention_2")
