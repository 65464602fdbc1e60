"""Models some of whose layers attend to the keys of an earlier layer (Gemma 3n; Gemma 4 is in the family table)."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvcompress
from kvcompress.cache.layer import wrap_keys
from kvcompress.check.reference import generate, only_attending_to
from kvcompress.hooks.attention import attend_to_others
from tests.family_table import kept_of


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # which timm imports where it is there: seconds
        from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

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
    with torch.random.fork_rng():
        model = Gemma3nForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.data.normal_(std=weight[0].numel() ** -0.5, generator=generator)
    return model.requires_grad_(False)


OPTIONS = {
    "uniform": {},
    "ragged": {"head_budget": "adaptive"},
    "static": {"cache_implementation": "static", "max_new_tokens": 6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [(30,), (30, 19)])
def test_layers_without_keys_see_what_the_layer_whose_keys_they_get_kept(model, lengths, options):
    ids = torch.stack([torch.arange(10, 40).roll(row) for row in range(len(lengths))])
    mask = torch.stack([torch.arange(30) >= 30 - length for length in lengths]).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    _, plain = generate(model, inputs, 5)
    with kvcompress.compress(model, "snapkv", 0.3, window_size=4, **options) as session:
        tokens, logits = generate(model, inputs, 5)
    kept = kept_of(session.cache)
    assert [layer is not None for layer in kept[:2]] == [True, True]
    with only_attending_to(model, kept):
        _, expected = generate(model, inputs, 5, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert (logits - plain).abs().max() > 0.01


def test_layers_without_keys_attend_where_entries_lie(model, as_on_cuda):
    """The layer that provides their keys has already written the token."""
    test_layers_without_keys_see_what_the_layer_whose_keys_they_get_kept(model, (30, 19), OPTIONS["static"])


@pytest.mark.parametrize("queries", [1, 5, 9])
def test_where_a_model_leaves_out_queries_the_last_ones_attend_as_among_all(queries):
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    module = SimpleNamespace(is_causal=True)
    attend = partial(attend_to_others, "sdpa", module)
    shared = wrap_keys(key, SimpleNamespace(is_first_prompt=True, decodes_in_place=False))
    every, _ = sdpa_attention_forward(module, query, key, value, None)
    last, _ = attend(query[:, :, -queries:], shared, value, None)
    torch.testing.assert_close(last, every[:, -queries:])


def test_later_prompts_and_evictions_while_decoding_go_through_shared_keys(model):
    ids = torch.arange(10, 40)[None]
    with kvcompress.compress(model, "snapkv", 1.0, window_size=4) as session:
        model(ids[:, :20])
        with session.reuse() as cache:
            output = model(ids[:, 20:], past_key_values=cache)
    torch.testing.assert_close(output.logits, model(ids).logits[:, 20:], atol=1e-4, rtol=0)
    for options in ({}, {"head_budget": "adaptive"}, {"first_token": "compressed"}, {"prefill_chunk": 7}):
        with kvcompress.compress(model, "snapkv", 0.5, window_size=4, decode_budget=8, decode_interval=2, **options):
            _, logits = generate(model, {"input_ids": ids}, 9)
        assert logits.isfinite().all()
