"""Models some of whose layers attend to the keys of an earlier layer (gemma3n)."""

import pytest
import torch
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nForCausalLM

import kvcompress


def test_a_model_whose_layers_share_keys_is_one_clear_error():
    config = Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        laurel_rank=4,
        altup_num_inputs=2,
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model, ids = Gemma3nForCausalLM(config).eval(), torch.arange(10, 40)[None]
    said = r"layer 2 attends to the keys of layer 1: .* not supported"
    with kvcompress.compress(model, "snapkv", 0.5), pytest.raises(kvcompress.KVCompressError, match=said):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 32), "outside it is as before"
