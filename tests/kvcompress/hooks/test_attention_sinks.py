"""Attention sinks (gpt-oss): a learned logit per head that takes its part of every softmax."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, GptOssConfig, GptOssForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvcompress
from kvcompress.check.reference import generate


def with_sinks(module, query, key, value, attention_mask, scaling, s_aux, **kwargs):
    groups = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    sinks = s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


@pytest.fixture(scope="module")
def model() -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            weight.data.normal_(std=2.0 if name.endswith("sinks") else weight.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "max_new_tokens": 4}], ids=["ragged", "static"]
)
def test_sinks_keep_their_part_of_the_attention_while_ragged_heads_decode(model, options, as_on_cuda):
    """Only plain attention attends to entries in place; `eager` never does."""
    AttentionInterface.register("with_sinks", with_sinks)
    AttentionMaskInterface.register("with_sinks", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    ids = torch.randint(8, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :9] = 0
    logits = {}
    for implementation in ("eager", "with_sinks"):
        model.config._attn_implementation = implementation
        with kvcompress.compress(model, "adakv", 0.3, window_size=4, **options) as session:
            tokens, logits[implementation] = generate(model, inputs, 4, forced=logits.get("tokens"))
        logits.setdefault("tokens", tokens)
        assert session.cache.compressed_layers[0].storage.decodes_in_place
    torch.testing.assert_close(logits["with_sinks"], logits["eager"], atol=1e-4, rtol=0)


def test_a_method_that_undoes_rotations_is_refused_in_one_line(model):
    """Its cos and sin have half the channels."""
    with pytest.raises(kvcompress.KVCompressError, match="GptOssModel rotates queries in an unknown way"):
        kvcompress.compress(model, "expected-attention", 0.4)
